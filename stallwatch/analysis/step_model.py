"""What a token of prefill costs the readers beside it, and how much prefill a step may carry within an objective.

A step takes t = a + c*d + b*p seconds with d decoders and p prompt tokens. a and c come from prefill-free steps alone:
a joint fit lets the prompts' cost leak into them and gave c < 0. Then each step with prefill has its own
b = (t - a - c*d) / p. It is not one number: a token attends to all before it, so the same chunk costs several times as
much at the end of a long prompt. So b is kept as a distribution, and as b0 + b1*context where the context is known.
Quantiles of b are weighted by tokens: were all prompts computed in chunks of one size, that is the share of such steps.

A budget is one figure for the readers' objective D: floor((D - a - c*d) / b95). It holds for prompts like those seen.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from typing import Final

from stallwatch.analysis.baseline import DecodeLine, DecodeSums
from stallwatch.analysis.paired import PairedInterval
from stallwatch.analysis.prefill import StepSums

LEAST_MIXED: Final = 50
"""Steps with prefill below which there is no budget."""
SMALLER_CHUNKS: Final = 0.9
"""Headroom where the advice is less than half of the chunks seen: on a real vLLM chunks of 93 tokens took up to 15 %
longer than chunks of 511 had led to expect, and 13 % of the steps exceeded the objective without it."""
LEAST_R2: Final = 0.5
"""Share of the variance of step times below which the model explains too little to advise."""
_SAMPLES: Final = 256
_HELD_UP: Final = 10.0
"""Times what the largest usual chunk costs, or a usual step with prefill, above which a step's length is not its
prompts' doing: a clock that fell, or the end of a long prompt, make it a few times."""
_LEAST_USUAL: Final = 20
"""Samples with prefill below which nothing is usual yet."""
_BELIEVED: Final = 4
"""Such steps in a row that are what is usual from now on."""
_LEAST_CONTEXT_SAMPLES: Final = 5
_LEAST_CHUNKS: Final = 3.0
"""Chunks that the contexts seen must span before the cost of context can be told from noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSteps:
    """Steps that ended together, some of them with prefill: sums over all of them."""

    steps: float
    mixed: float
    decode: float  # decoders, summed over steps
    beside: float  # decoders in a step with prefill
    waited: float  # seconds, summed over decoders and steps
    prefill: float  # tokens
    context: float | None  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBudget:
    """The largest chunk of prefill that keeps 95 % of such steps inside the objective."""

    tokens: int
    objective: float  # seconds
    decoders: float  # that it leaves room for
    context_min: float | None  # tokens of context seen
    context_max: float | None
    extrapolated: bool
    """Larger than any chunk seen, or asked of prompts deeper than any seen."""
    batched_tokens: int
    """For `--max-num-batched-tokens`: the budget and the decodes beside it, and what vLLM demands at least."""
    max_num_seqs: int | None  # None when the server does not tell: it must not be above `batched_tokens`


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModelView:
    """The model as it stands; seconds, seconds a decoder, seconds a prompt token."""

    base: float | None
    per_decoder: float | None  # None when the number of decoders never varied
    per_token: dict[float, float]  # b by quantile
    per_token_start: float | None  # b0
    per_token_context: float | None  # b1, for each token of context
    r2: float | None
    mixed_steps: float
    context_min: float | None
    context_max: float | None


@dataclass(slots=True)
class StepModel:
    """Learns from the steps of one engine."""

    _line: DecodeLine = field(default_factory=DecodeLine)
    _mixed: deque[MixedSteps] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    _strange: int = 0  # held up, in a row

    def restart(self) -> None:
        """The server is another process, perhaps of another model."""
        self._line = DecodeLine()
        self._mixed.clear()

    def add(self, seen: PairedInterval) -> None:
        """Takes the steps of an interval."""
        if seen.exact is not None:
            decode = seen.exact.phases.get("decode")
            if decode is not None and decode.steps > 0:
                self._line.add(seen.until, _sums(decode))
        elif seen.steps >= 1 and seen.decoding_only:
            self._line.add(seen.until, DecodeSums.of_interval(seen.steps, seen.decoders, seen.seconds))
        sample = _mixed(seen)
        if sample is not None:
            self._mixed.append(sample)

    def held_up(self, seen: PairedInterval) -> bool:
        """Whether steps with prefill took so long that something else than their prompts must have held them up."""
        sample = _mixed(seen)
        if sample is None:
            return False
        costs = self._costs() if len(self._mixed) >= _LEAST_USUAL else []
        base = self._line.along(self._line.fit, sample.decode / sample.steps) if costs else None
        self._strange += 1
        if base is not None and self._strange < _BELIEVED:
            chunk = _quantile_of([(s.prefill / max(1.0, s.mixed), s.prefill) for s, _ in costs], 0.95)
            usual = _quantile(costs, 0.95) * max(chunk, sample.prefill / max(1.0, sample.mixed))
            # Where tokens are put into a neighbouring interval, those left in a step say nothing of what it takes.
            lengths = [(cost * s.prefill / max(1.0, s.mixed), max(1.0, s.mixed)) for s, cost in costs]
            usual = max(usual, _quantile_of(lengths, 0.95))
            excess = (sample.waited - sample.decode * base) / sample.beside / max(1.0, sample.mixed)
            if excess > _HELD_UP * usual > 0:
                return True
        self._strange = 0
        return False

    def view(self) -> StepModelView | None:
        """The coefficients; None while nothing is known."""
        fit = self._line.fit
        if fit is None:
            return None
        costs = self._costs()
        start, slope = _by_context(costs)
        contexts = [sample.context for sample, _ in costs if sample.context is not None]
        quantiles = {q: _quantile(costs, q) for q in (0.5, 0.9, 0.95)} if costs else {}
        return StepModelView(
            base=fit[0],
            per_decoder=fit[1],
            per_token=quantiles,
            per_token_start=start,
            per_token_context=slope,
            r2=self._r2(costs, start, slope),
            mixed_steps=sum(sample.mixed for sample, _ in costs),
            context_min=min(contexts, default=None),
            context_max=max(contexts, default=None),
        )

    def budget(
        self,
        objective: float,
        *,
        view: StepModelView | None = None,
        deepest: float | None = None,
        max_num_seqs: int | None = None,
    ) -> PrefillBudget | None:
        """The prefill that a step may carry; None when too little was seen or the model does not explain it.

        Args:
            objective: Seconds that a step may take.
            view: The model's view, if it was just made.
            deepest: Context that an open prompt will reach, tokens.
            max_num_seqs: The server's setting, below which vLLM refuses the token budget.
        """
        view = view or self.view()
        if view is None or view.mixed_steps < LEAST_MIXED or view.r2 is None or view.r2 < LEAST_R2:
            return None
        cost = view.per_token[0.95]
        decoders = _quantile_of([(s.beside, s.prefill) for s in self._mixed], 0.9)
        base = self._line.seconds(decoders)
        if base is None or cost <= 0:
            return None
        tokens = max(0, floor((objective - base) / cost))
        chunks = [(s.prefill / max(1.0, s.mixed), s.prefill) for s in self._mixed]
        if tokens < _quantile_of(chunks, 0.5) / 2:
            # Each step reads the context's cache once, however small its chunk: fewer tokens share that cost.
            tokens = floor(tokens * SMALLER_CHUNKS)
        deeper = deepest is not None and (view.context_max is None or deepest > view.context_max)
        return PrefillBudget(
            tokens=tokens,
            objective=objective,
            decoders=decoders,
            context_min=view.context_min,
            context_max=view.context_max,
            extrapolated=tokens > max(s.prefill / max(1.0, s.mixed) for s in self._mixed) or deeper,
            batched_tokens=max(tokens + ceil(decoders), max_num_seqs or 1),
            max_num_seqs=max_num_seqs,
        )

    def _costs(self) -> list[tuple[MixedSteps, float]]:
        """Each sample with its b, as the line stands now."""
        costs = []
        fit = self._line.fit
        for sample in self._mixed:
            base = self._line.along(fit, sample.decode / sample.steps)
            if base is not None:
                # A slow step weighs by its decoders, so all the excess is put on those of the steps with prefill.
                costs.append((sample, (sample.waited - sample.decode * base) / sample.beside / sample.prefill))
        return costs

    def _r2(self, costs: Sequence[tuple[MixedSteps, float]], start: float | None, slope: float | None) -> float | None:
        """Share of the variance of step times that the model explains, over steps with prefill and without.

        Steps with prefill of which only the sum is known count as equal ones.
        """
        if not costs:
            return None
        typical = _quantile(costs, 0.5)
        line, fit = self._line, self._line.fit
        n, t, tt = line.n, line.t, line.tt
        error = line.squared_error()
        for sample, cost in costs:
            base, chunk = line.along(fit, sample.beside) or 0.0, sample.prefill / max(1.0, sample.mixed)
            mean = base + cost * chunk
            n, t, tt = n + sample.mixed, t + sample.mixed * mean, tt + sample.mixed * mean * mean
            if start is None or slope is None or sample.context is None:
                expected = typical
            else:
                expected = start + slope * sample.context
            error += sample.mixed * ((cost - expected) * chunk) ** 2
        total = tt - t * t / n
        return max(0.0, 1 - error / total) if total > 0 else None


def _mixed(seen: PairedInterval) -> MixedSteps | None:
    """The steps with prefill of an interval, and with what else they are only known together."""
    if seen.exact is not None:
        mixed = seen.exact.phases.get("mixed")
        if mixed is None or mixed.steps <= 0 or mixed.prefill <= 0:
            return None
        return MixedSteps(
            steps=mixed.steps,
            mixed=mixed.steps,
            decode=mixed.decode,
            beside=max(1.0, mixed.decode / mixed.steps),
            waited=mixed.decode_seconds,
            prefill=mixed.prefill,
            context=seen.context,
        )
    if seen.steps < 1 or seen.decoding_only or not seen.prefill or not seen.accompanied:
        return None
    return MixedSteps(
        steps=seen.steps,
        mixed=seen.mixed,
        decode=seen.samples,
        beside=seen.decoders_beside,
        waited=seen.waited,
        prefill=seen.prefill,
        context=seen.context,
    )


def _sums(sums: StepSums) -> DecodeSums:
    return DecodeSums(
        n=sums.steps,
        d=sums.decode,
        t=sums.seconds,
        dd=sums.decode_squares,
        dt=sums.decode_seconds,
        tt=sums.seconds_squares,
    )


def _quantile(costs: Sequence[tuple[MixedSteps, float]], q: float) -> float:
    return _quantile_of([(cost, sample.prefill) for sample, cost in costs], q)


def _quantile_of(weighted: Sequence[tuple[float, float]], q: float) -> float:
    goal = q * sum(weight for _, weight in weighted)
    reached = 0.0
    ordered = sorted(weighted)
    for value, weight in ordered:
        reached += weight
        if reached >= goal * (1 - 1e-12):
            return value
    return ordered[-1][0]


def _by_context(costs: Sequence[tuple[MixedSteps, float]]) -> tuple[float | None, float | None]:
    """b0 and b1 by least squares over tokens; a slope that is not positive is none, a start that is not is no fit."""
    known = [(s.context, cost, s.prefill) for s, cost in costs if s.context is not None]
    total = sum(weight for _, _, weight in known)
    if len(known) < _LEAST_CONTEXT_SAMPLES or total <= 0:
        return None, None
    contexts = [x for x, _, _ in known]
    chunk = total / sum(max(1.0, s.mixed) for s, _ in costs if s.context is not None)
    if max(contexts) - min(contexts) < _LEAST_CHUNKS * chunk:
        return None, None
    mean_x = sum(x * w for x, _, w in known) / total
    mean_y = sum(y * w for _, y, w in known) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in known)
    slope = max(0.0, sum(w * (x - mean_x) * (y - mean_y) for x, y, w in known) / spread)
    start = mean_y - slope * mean_x
    return (start, slope) if start > 0 else (None, None)
