"""Whether the engine makes progress, seen from its metrics alone.

vLLM's gauges and counters move only when an engine step ends. A step has ended when any of them moved: the iteration
count alone stands still for a whole phase of prefill without decoders. All running decoders get a token in each step,
so the number of ITL samples per iteration is the number of decoders.
"""

from dataclasses import dataclass, field

from stallwatch.analysis.counting import Growth, delta
from stallwatch.observations import EngineCounters

_SIGNALS = ("kv_usage", "running", "waiting", "prefix_queries", "iterations", "generation_tokens", "itl_count")


@dataclass(frozen=True, slots=True)
class StepInterval:
    """What happened between two scrapes of one engine; `since` and `until` are the times of the two readings."""

    since: float
    until: float
    moved: bool  # at least one step ended
    steps: float | None  # steps that produced output
    mean_itl: float | None  # seconds, over the samples booked since `itl_since`
    itl_since: float  # the reading before that had ITL counters; `since`, unless a smaller scrape lay between
    tokens_per_sample: float | None  # tokens that one decoder got in one step
    silence: float  # seconds known to be without the end of a step, up to `until`; 0 when one ended


@dataclass(slots=True)
class StepWatch:
    """Follows one engine from scrape to scrape."""

    decoders: float = 0.0  # requests known to be decoding after the last scrape
    running: float | None = None
    progressed_at: float | None = None  # the reading that saw the last movement, or the first reading of all
    read_at: float | None = None  # the last reading
    _asked_at: float | None = None
    _without_output: int = 0  # successive intervals that moved without a token
    _last: EngineCounters | None = None
    _growth: Growth = field(default_factory=Growth)
    _samples: tuple[float, float, float] | None = None  # time, itl_count and itl_sum of the last scrape with both

    def scraped(self, counters: EngineCounters, sent_at: float, at: float) -> StepInterval | None:
        """Takes a scrape; None for the first one, after which nothing can be compared yet."""
        before, since = self._last, self.read_at
        itl_since, mean = self._mean_itl(counters, at)
        left, joined = self._growth.of(counters, "finished_count"), self._growth.of(counters, "first_tokens")
        self._last = counters
        self.running = counters.running
        self.read_at = at
        self._asked_at = sent_at
        if before is None or since is None:
            self.progressed_at = at
            return None
        moved = any(_differs(getattr(before, name), getattr(counters, name)) for name in _SIGNALS)
        if moved:
            self._count_decoders(before, counters, left or 0.0, joined or 0.0)
            self.progressed_at = at
        steps = delta(before.iterations, counters.iterations)
        samples = delta(before.itl_count, counters.itl_count)
        generated = delta(before.generation_tokens, counters.generation_tokens)
        return StepInterval(
            since=since,
            until=at,
            moved=moved,
            steps=steps,
            mean_itl=mean,
            itl_since=since if itl_since is None else itl_since,
            tokens_per_sample=max(1.0, (generated - (joined or 0.0)) / samples) if generated and samples else None,
            silence=self.age(),
        )

    def restart(self) -> None:
        """The server is another process, or its counters fell: nothing before may be compared with what follows."""
        self._last = None
        self._growth.forget()
        self._samples = None
        self.decoders = 0.0
        self.progressed_at = None

    def age(self) -> float:
        """Seconds without the end of a step, up to the last reading: a lower bound; 0 while no request runs."""
        if self.progressed_at is None or self._asked_at is None or not self.running:
            return 0.0
        return max(0.0, self._asked_at - self.progressed_at)

    def _mean_itl(self, counters: EngineCounters, at: float) -> tuple[float | None, float | None]:
        """The time since which, and the mean of the samples booked since then."""
        if counters.itl_count is None or counters.itl_sum is None:
            return None, None
        previous, self._samples = self._samples, (at, counters.itl_count, counters.itl_sum)
        if previous is None:
            return None, None
        count, seconds = counters.itl_count - previous[1], counters.itl_sum - previous[2]
        return previous[0], seconds / count if count > 0 and seconds >= 0 else None

    def _count_decoders(self, before: EngineCounters, after: EngineCounters, left: float, joined: float) -> None:
        steps = delta(before.iterations, after.iterations)
        samples = delta(before.itl_count, after.itl_count)
        if steps is None or samples is None:
            return
        self._without_output = self._without_output + 1 if steps == 0 else 0
        if steps == 0:
            # Only prefill went on: a decoder would have got a token in each of its steps. Not so the first time, since
            # under async scheduling the gauges run one step ahead of the tokens.
            if self._without_output > 1:
                self.decoders = 0.0
            return
        # Those that left during the interval no longer wait, those that got their first token do.
        left = max(left, delta(after.running, before.running) or 0.0)
        self.decoders = max(0.0, samples / steps - left + joined)
        if after.running is not None:
            self.decoders = min(self.decoders, after.running)


def _differs(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and before != after
