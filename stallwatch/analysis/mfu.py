"""Prefill tokens that vLLM scheduled between two polls, from `--enable-mfu-metrics`.

vLLM adds an analytic figure to `estimated_write_bytes_per_gpu` at the end of every step: alpha * T + beta * L, with T
the scheduled tokens and L the rows of logits, which are one for each decode token and one for each chunk of a prompt
(`vllm/v1/metrics/perf.py`). Context lengths do not enter. So after taking out the decodes, what is left is
alpha * prefill + beta * chunks, and since all four are integers both can be read off.

alpha and beta are properties of the model on its GPUs. They are learned here from the counters alone:

* alpha + beta is what a decode costs. Anything else in an interval only adds, so it is the smallest bytes per decode,
  once several intervals agree on it to the byte.
* alpha follows from stretches whose prompts are all booked (`prompt_tokens_by_source`): only the number of chunks is
  unknown, and few numbers of chunks leave an integer. What several stretches agree on is alpha.

Limits: recompute after a preemption is scheduled work like any prefill and cannot be told from it. A decode whose
request was aborted, or had already stopped under async scheduling, is work without an output: it looks like a prompt of
one token in one chunk. Such are left out where they stand alone; beside a real prompt they add a token each. Models
that vLLM has no formula for leave the counter at 0: unknown.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from stallwatch.observations import EngineCounters

_AGREE: Final = 3
"""Intervals that must show the same bytes per decode."""
_MOST_CHUNKS: Final = 256
"""Chunks tried for one stretch or interval; longer stretches are too ambiguous to learn from."""
_EXACT: Final = 2.0**53
"""Above this a float no longer holds every integer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MfuInterval:
    """What the write counter says of one poll interval of one engine."""

    prefill_tokens: float
    """Prompt tokens in steps that ended in the interval, recompute included."""
    chunks: int | None
    """Requests times steps that those tokens were spread over; None when no whole number fits."""
    exact: bool
    """The figures are whole numbers that explain the counter to the byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    written: float
    decodes: float
    computed: float
    firsts: float
    unbooked: float | None  # admitted minus booked tokens, up to a constant that aborts raise
    preemptions: float
    idle: bool


class MfuEstimator:
    """Follows the write counter of one engine; answers None until it has calibrated itself."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets everything, as after a restart of the engine."""
        self._per_decode: int | None = None
        self._alpha: int | None = None
        self._lowest: deque[float] = deque(maxlen=64)
        self._candidates: set[int] | None = None
        self._agreed = 0
        self._start: _Point | None = None
        self._stretches: deque[tuple[_Point, _Point]] = deque(maxlen=16)
        self._settled: float | None = None

    @property
    def alpha(self) -> int | None:
        """Bytes that one scheduled token writes, once known."""
        return self._alpha

    @property
    def beta(self) -> int | None:
        """Bytes that one row of logits writes, once known."""
        return None if self._alpha is None or self._per_decode is None else self._per_decode - self._alpha

    def update(self, before: EngineCounters, after: EngineCounters) -> MfuInterval | None:
        """Judges the interval between two scrapes; a counter that fell is a restart and forgets everything."""
        first, last = _point(before), _point(after)
        if first is None or last is None:
            return None
        written = last.written - first.written
        decodes = last.decodes - first.decodes
        if written < 0 or decodes < 0 or last.computed < first.computed or last.firsts < first.firsts:
            self.reset()
            return None
        if last.written <= 0 or last.written >= _EXACT:
            return None
        self._learn_decode(written, decodes)
        self._learn_alpha(first, last)
        return self._judge(written, decodes)

    def _judge(self, written: float, decodes: float) -> MfuInterval | None:
        alpha, beta = self.alpha, self.beta
        if alpha is None or beta is None or self._per_decode is None:
            return None
        rest = written - self._per_decode * decodes
        if rest <= 0:
            return MfuInterval(prefill_tokens=0.0, chunks=0, exact=rest == 0)
        for chunks in range(1, _MOST_CHUNKS):
            left = rest - beta * chunks
            if left < alpha * chunks:
                break
            if left % alpha == 0:
                tokens = left // alpha
                return MfuInterval(prefill_tokens=0.0 if tokens == chunks else tokens, chunks=chunks, exact=True)
        return MfuInterval(prefill_tokens=max(0.0, (rest - beta) / alpha), chunks=None, exact=False)

    def _learn_decode(self, written: float, decodes: float) -> None:
        if decodes <= 0 or written % decodes:
            return
        each = written / decodes
        if self._per_decode is not None and each >= self._per_decode:
            return
        self._lowest.append(each)
        lowest = min(self._lowest)
        if self._lowest.count(lowest) >= _AGREE and lowest != self._per_decode:
            self._per_decode = int(lowest)
            self._candidates, self._alpha, self._agreed = None, None, 0
            for start, end in self._stretches:
                self._narrow(start, end, self._per_decode)

    def _learn_alpha(self, first: _Point, last: _Point) -> None:
        """A stretch runs from one moment without an open prompt to the next."""
        if self._start is None:
            if not first.idle:
                return
            self._start, self._settled = first, first.unbooked
        start = self._start
        balanced = last.unbooked == self._settled
        if not last.idle and (last.unbooked is None or not balanced):
            return
        if balanced and last.firsts > start.firsts and last.preemptions == start.preemptions:
            self._stretches.append((start, last))
            if self._per_decode is not None:
                self._narrow(start, last, self._per_decode)
        self._start, self._settled = last, last.unbooked

    def _narrow(self, start: _Point, last: _Point, per_decode: int) -> None:
        prompts = last.firsts - start.firsts
        computed = last.computed - start.computed
        rest = last.written - start.written - per_decode * (last.decodes - start.decodes)
        found: set[int] = set()
        for more in range(_MOST_CHUNKS):
            chunks = prompts + more
            tokens = computed - chunks
            if tokens <= 0:
                break
            left = rest - per_decode * chunks
            if left > 0 and left % tokens == 0 and left / tokens <= per_decode:
                found.add(int(left // tokens))
        if not found:
            return
        narrowed = found if self._candidates is None else self._candidates & found
        if not narrowed:  # one of the two stretches held work that no counter books
            self._candidates, self._agreed = found, 1
            return
        self._agreed = 1 if self._candidates is None else self._agreed + 1
        self._candidates = narrowed
        if len(narrowed) == 1 and self._agreed >= 2:
            self._alpha = next(iter(narrowed))


def _point(counters: EngineCounters) -> _Point | None:
    if (
        counters.write_bytes is None
        or counters.generation_tokens is None
        or counters.first_tokens is None
        or counters.prompt_local_compute is None
    ):
        return None
    decodes = counters.generation_tokens - counters.first_tokens
    if counters.spec_draft_tokens and counters.itl_count is not None:
        # One sample a request and step, however many drafted tokens were scheduled beside its own.
        decodes = counters.itl_count + counters.spec_draft_tokens
    admitted = (counters.prefix_queries or 0.0) - (counters.prefix_hits or 0.0) - (counters.external_hits or 0.0)
    return _Point(
        written=counters.write_bytes,
        decodes=decodes,
        computed=counters.prompt_local_compute,
        firsts=counters.first_tokens,
        unbooked=admitted - counters.prompt_local_compute if counters.prefix_queries else None,
        preemptions=counters.preemptions or 0.0,
        idle=counters.running == 0 and counters.waiting == 0,
    )
