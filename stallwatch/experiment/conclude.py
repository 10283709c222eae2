"""The statement that follows from the runs, and no more. Pure.

The argument is one of exclusion. The streams, the server and the request that goes beside them are the same in all
runs; only what the engine has to compute for that request differs. Streams that pause beside the uncached prompt alone
pause for that work. Which kernel, or which resource it exhausts, is not shown by it. Every other outcome gets a
statement of its own, or none and what to do about it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Final

from stallwatch.analysis.causes import Cause
from stallwatch.experiment import statistics
from stallwatch.experiment.measure import MEASURES, Run
from stallwatch.experiment.plan import Arm
from stallwatch.experiment.statistics import Estimate

LEAST_PAIRS: Final = 3
"""Blocks in which both runs are valid, below which nothing is concluded."""
RELEVANT_SECONDS: Final = 0.1
RELEVANT_GAPS: Final = 5.0
"""A pause matters from so many seconds, or so many usual gaps if that is more."""
REST_SHARE: Final = 0.25
"""The most that streams may lose beside the cached prompt, of what they lose beside the uncached one, so that the pause
counts as that of computing it."""
INSIDE_SHARE: Final = 0.8
"""The least of the lost seconds that must lie where the prompt was being computed."""


_USUAL_PAIRS: Final = 5  # from which on 95 % intervals hold about what they promise


CLOCK_SHARE: Final = 0.8
"""The least that the GPUs' clock may be while the prompt is computed, of what it is when the streams are alone."""


class Verdict(StrEnum):
    """What the runs show."""

    PREFILL = "prefill"  # only the uncached prompt pauses the streams
    PARTLY = "partly"  # the uncached prompt pauses them more than the cached one, which does so too
    EITHER_WAY = "either_way"  # the prompt pauses them, cached or not
    NO_PAUSE = "no_pause"  # the prompt pauses nobody
    CONTRADICTED = "contradicted"  # the pattern of prefill, but another cause was seen at work
    INCONCLUSIVE = "inconclusive"


CONTRASTS: Final = ((Arm.UNCACHED, Arm.ALONE), (Arm.UNCACHED, Arm.CACHED), (Arm.CACHED, Arm.ALONE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """How a measure differs between two kinds of runs, over the blocks that have a valid one of both."""

    measure: str
    one: Arm
    other: Arm
    one_mean: float
    other_mean: float
    difference: Estimate
    ratio: Estimate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What follows for one length of prompt."""

    prompt_tokens: int
    verdict: Verdict
    statement: str
    because: tuple[str, ...]
    not_shown: tuple[str, ...]
    advice: tuple[str, ...]
    effects: tuple[Effect, ...]


def valid(runs: Sequence[Run], arm: Arm, prompt_tokens: int | None) -> Mapping[int, Run]:
    """The valid runs of a kind, by block."""
    wanted = None if arm is Arm.ALONE else prompt_tokens
    return {
        run.planned.block: run
        for run in runs
        if run.planned.arm is arm and run.planned.prompt_tokens == wanted and not run.void
    }


def effects(runs: Sequence[Run], prompt_tokens: int, *, seed: int) -> tuple[Effect, ...]:
    """All effects that can be stated."""
    return tuple(_effects(runs, prompt_tokens, seed))


def _effects(runs: Sequence[Run], prompt_tokens: int, seed: int) -> Iterator[Effect]:
    for one, other in CONTRASTS:
        ones, others = valid(runs, one, prompt_tokens), valid(runs, other, prompt_tokens)
        blocks = sorted(ones.keys() & others.keys())
        for measure in MEASURES:
            pairs = [
                (ones[block].measures[measure.name], others[block].measures[measure.name])
                for block in blocks
                if measure.name in ones[block].measures and measure.name in others[block].measures
            ]
            if not pairs:
                continue
            left, right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            difference = statistics.paired(left, right, seed=seed)
            if difference is not None:
                yield Effect(
                    measure=measure.name,
                    one=one,
                    other=other,
                    one_mean=sum(left) / len(left),
                    other_mean=sum(right) / len(right),
                    difference=difference,
                    ratio=statistics.ratio(left, right, seed=seed),
                )


def conclude(runs: Sequence[Run], prompt_tokens: int, *, usual_gap: float | None, seed: int) -> Conclusion:
    """What the runs say about a prompt of this length."""
    found = effects(runs, prompt_tokens, seed=seed)
    lost = {(seen.one, seen.other): seen.difference for seen in found if seen.measure == "lost_seconds"}
    relevant = max(RELEVANT_SECONDS, RELEVANT_GAPS * (usual_gap or 0.0))
    judged = _Judged(runs, prompt_tokens, lost, relevant)
    said = judged.verdict()
    return Conclusion(
        prompt_tokens=prompt_tokens,
        verdict=said.verdict,
        statement=said.statement,
        because=tuple(judged.because()),
        not_shown=NOT_SHOWN.get(said.verdict, ()),
        advice=tuple(said.advice),
        effects=found,
    )


NOT_SHOWN: Final[Mapping[Verdict, tuple[str, ...]]] = {
    Verdict.PREFILL: (
        "which kernel or which resource the work exhausts (compute, memory bandwidth, host, communication)",
        "that pauses in production have this cause: there the load is another",
        "anything about other prompt lengths, budgets, models or hardware than those of this report",
    ),
    Verdict.PARTLY: ("what the rest is: what is done for a prompt whether or not it is cached has many parts",),
    Verdict.EITHER_WAY: (
        "which part of the path it is: transfer, tokenisation, admission, or loading the cached state",
    ),
    Verdict.NO_PAUSE: ("that a longer prompt, a larger token budget or several prompts at once would not pause them",),
    Verdict.CONTRADICTED: ("how much of the pause each of the two causes explains",),
}


@dataclass(frozen=True, slots=True)
class _Said:
    verdict: Verdict
    statement: str
    advice: list[str]


@dataclass(frozen=True, slots=True)
class _Judged:
    runs: Sequence[Run]
    prompt_tokens: int
    lost: Mapping[tuple[Arm, Arm], Estimate]
    relevant: float

    def verdict(self) -> _Said:
        uncached = self.lost.get((Arm.UNCACHED, Arm.ALONE))
        against = self.lost.get((Arm.UNCACHED, Arm.CACHED))
        rest = self.lost.get((Arm.CACHED, Arm.ALONE))
        if uncached is None or uncached.n < LEAST_PAIRS:
            return self._too_few("beside the uncached prompt and alone", 0 if uncached is None else uncached.n)
        if uncached.high < self.relevant:
            return _Said(
                Verdict.NO_PAUSE,
                f"The uncached prompt of {self.prompt_tokens:,} tokens does not pause the streams: they lose "
                f"{_span(uncached)} more beside it than alone, and less than {self.relevant:.2f} s counts as none.",
                ["try a longer prompt (--prompt-tokens), or several streams more"],
            )
        if uncached.low <= self.relevant:
            return _Said(
                Verdict.INCONCLUSIVE,
                "Inconclusive: whether the uncached prompt pauses the streams cannot be told; they lose "
                f"{_span(uncached)} more beside it than alone, and {self.relevant:.2f} s or more would count.",
                self._more(),
            )
        if against is None or rest is None or min(against.n, rest.n) < LEAST_PAIRS:
            few = self._too_few("beside the prompt as a confirmed cache hit", 0 if against is None else against.n)
            return _Said(
                few.verdict,
                f"The uncached prompt of {self.prompt_tokens:,} tokens pauses the streams by {_span(uncached)}. "
                f"{few.statement}",
                few.advice,
            )
        if against.low <= 0:
            if rest.low > self.relevant:
                return _Said(
                    Verdict.EITHER_WAY,
                    f"The prompt of {self.prompt_tokens:,} tokens pauses the streams, cached ({_span(rest)}) or not "
                    f"({_span(uncached)}): the pause is not in the work of building prompt state.",
                    ["look at what happens to every prompt: proxy, tokenisation, the API server's CPU"],
                )
            return _Said(
                Verdict.INCONCLUSIVE,
                "Inconclusive: the streams pause beside the uncached prompt, but whether less beside the cached one "
                f"cannot be told ({_span(against)} apart).",
                self._more(),
            )
        if rest.high > REST_SHARE * uncached.low:
            if rest.low <= self.relevant:
                return _Said(
                    Verdict.INCONCLUSIVE,
                    "Inconclusive: the streams pause more beside the uncached prompt than beside the cached one, but "
                    f"how much of it remains beside the cached one cannot be told ({_span(rest)}).",
                    self._more(),
                )
            return _Said(
                Verdict.PARTLY,
                f"The uncached prompt pauses the streams by {_span(uncached)}, the cached one by {_span(rest)}: a part "
                "of the pause is in the work of building prompt state, and a part is not.",
                ["look at what happens to every prompt: proxy, tokenisation, the API server's CPU"],
            )
        return self._pattern(uncached, rest)

    def _pattern(self, uncached: Estimate, rest: Estimate) -> _Said:
        """Only the uncached prompt pauses the streams: nothing else that was seen may explain that."""
        inside = [run.inside for run in self._of(Arm.UNCACHED) if run.inside is not None]
        if not inside or median(inside) < INSIDE_SHARE:
            share = f"{median(inside):.0%}" if inside else "none"
            return _Said(
                Verdict.INCONCLUSIVE,
                "Inconclusive: the streams pause in the runs with the uncached prompt, but not while it is computed "
                f"({share} of the time lost lies between its sending and its first token).",
                self._more(),
            )
        clock = self._clock()
        if clock is not None and clock < CLOCK_SHARE:
            return _Said(
                Verdict.CONTRADICTED,
                f"Only the uncached prompt pauses the streams ({_span(uncached)}), but while it is computed the GPUs' "
                f"clock is at {clock:.0%} of what it is beside streams alone: how much of the pause is the clock's is "
                "not shown.",
                ["find out why the clock falls (power, heat, another tenant), then run the experiment again"],
            )
        rival, seconds, all_seconds = self._rival()
        if rival is not None:
            return _Said(
                Verdict.CONTRADICTED,
                f"Only the uncached prompt pauses the streams ({_span(uncached)}), but {seconds:.1f} of "
                f"{all_seconds:.1f} stall seconds beside it show another cause at work: {rival}.",
                [f"remove that cause first ({rival}), then run the experiment again"],
            )
        pauses = sum(run.measures.get("preemptions", 0.0) for run in self._of(Arm.UNCACHED))
        if pauses:
            return _Said(
                Verdict.CONTRADICTED,
                f"Only the uncached prompt pauses the streams ({_span(uncached)}), but {pauses:.0f} requests were "
                "preempted beside it: the KV cache was too small, and that pauses streams too.",
                ["run fewer streams or a shorter prompt, so that the KV cache holds all of them"],
            )
        return _Said(
            Verdict.PREFILL,
            f"Only the uncached prompt pauses the streams: they lose {_span(uncached)} beside {self.prompt_tokens:,} "
            f"tokens that are computed, and {_span(rest)} beside the same tokens out of the prefix cache. The pause is "
            "in the work of building prompt state; which kernel or resource is not shown.",
            ["vary the token budget with the same load: stallwatch experiment --launch ... --sweep ..."],
        )

    def _clock(self) -> float | None:
        """The SM clock while the uncached prompt is computed, as a share of that when the streams are alone."""
        beside = self._known(Arm.UNCACHED, "gpu_sm_clock_beside_hertz")
        alone = self._known(Arm.ALONE, "gpu_sm_clock_hertz")
        return median(beside) / median(alone) if beside and alone and median(alone) > 0 else None

    def _known(self, arm: Arm, measure: str) -> list[float]:
        return [run.measures[measure] for run in self._of(arm) if measure in run.measures]

    def _rival(self) -> tuple[Cause | None, float, float]:
        """A cause other than prefill that the monitor saw explain half of the stalls beside the uncached prompt."""
        named = self._causes()
        total = sum(named.values())
        for cause, seconds in named.items():
            if cause not in {Cause.PREFILL, Cause.UNKNOWN} and seconds >= total / 2:
                return cause, seconds, total
        return None, 0.0, total

    def _causes(self) -> dict[Cause, float]:
        """What the monitor made of the stalls beside the uncached prompt. Seconds."""
        named: dict[Cause, float] = {}
        for run in self._of(Arm.UNCACHED):
            for cause, seconds in run.causes.items():
                named[cause] = named.get(cause, 0.0) + seconds
        return named

    def _too_few(self, where: str, pairs: int) -> _Said:
        void = [run for run in self.runs if run.void and run.planned.prompt_tokens in {None, self.prompt_tokens}]
        advice = []
        if any("meant to be cached" in why or "cannot be confirmed" in why for run in void for why in run.void):
            advice.append(
                "serve with prefix caching on (--enable-prefix-caching) and with --enable-prompt-tokens-details, and "
                "see that the KV cache has room for the prompt"
            )
        if any("we were late" in why for run in void for why in run.void):
            advice.append("run stallwatch on a machine, or on cores, that the server does not use")
        if any("more output tokens" in why for run in void for why in run.void):
            advice.append("ask for more --output-tokens")
        return _Said(
            Verdict.INCONCLUSIVE,
            f"Inconclusive: only {pairs} blocks have a valid run {where}, and {LEAST_PAIRS} are needed.",
            advice or self._more(),
        )

    def _more(self) -> list[str]:
        advice = ["more repeats (--repeats), or a longer prompt (--prompt-tokens)"]
        alone = [run.measures.get("lost_seconds", 0.0) for run in self._of(Arm.ALONE)]
        if alone and max(alone) > self.relevant:
            advice.insert(
                0,
                f"find out first why the streams pause when they are alone (up to {max(alone):.2f} s lost in a run)",
            )
        return advice

    def _of(self, arm: Arm) -> list[Run]:
        return list(valid(self.runs, arm, self.prompt_tokens).values())

    def because(self) -> Iterator[str]:
        """What was seen, in the order of its weight."""
        for (one, other), seen in self.lost.items():
            yield f"{one} less {other}: {_span(seen)} lost by a stream ({seen.n} blocks)"
        fewest = min((seen.n for seen in self.lost.values()), default=_USUAL_PAIRS)
        if fewest < _USUAL_PAIRS:
            yield (
                f"an interval over {fewest} blocks is hardly more than the range that was seen: five or more hold what "
                "they promise"
            )
        for arm in Arm:
            runs = self._of(arm)
            planned = [
                run
                for run in self.runs
                if run.planned.arm is arm and run.planned.prompt_tokens in {None, self.prompt_tokens}
            ]
            if planned and len(runs) < len(planned):
                yield f"{len(planned) - len(runs)} of {len(planned)} runs {arm} are void"
        shares = [run.inside for run in self._of(Arm.UNCACHED) if run.inside is not None]
        if shares:
            yield (
                f"{median(shares):.0%} of the time lost beside the uncached prompt lies between its sending and its "
                "first token"
            )
        named = self._causes()
        if named:
            told = ", ".join(
                f"{cause} {seconds:.1f} s" for cause, seconds in sorted(named.items(), key=lambda item: -item[1])
            )
            yield f"causes that the monitor named for the stalls beside it, told of nothing: {told}"


def _span(seen: Estimate) -> str:
    return f"{seen.mean:.2f} s [{seen.low:.2f}, {seen.high:.2f}]"
