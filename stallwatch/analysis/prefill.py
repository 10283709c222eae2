"""How many prompt tokens the engine computed between two polls, by the best evidence that the server offers.

The rungs, best first: the plugin's exact figures, the write counter of `--enable-mfu-metrics`, the token balance from
default flags, and what was booked when prompts ended. A rung is taken when its figures are there and move; it is given
up when they stop while the engine works, and everything is chosen anew after a restart. Every rung computes from its
own fields only, so that they can be compared; only the best is the answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stallwatch.analysis.balance import BalanceEstimator, BalanceInterval
from stallwatch.analysis.counting import delta, was_reset
from stallwatch.analysis.mfu import MfuEstimator, MfuInterval
from stallwatch.analysis.pace import PrefillPace, Stretch
from stallwatch.observations import Buckets, CacheFacts, EngineCounters

_PATIENCE: Final = 3
"""Intervals in which the engine made steps and a rung's figures stood still, after which the rung is given up."""


class Evidence(StrEnum):
    """Where a prefill figure comes from; the `evidence` label."""

    PLUGIN = "plugin"
    MFU = "mfu"
    BALANCE = "balance"
    COMPLETION = "completion"
    UNKNOWN = "unknown"


LADDER: Final = (Evidence.PLUGIN, Evidence.MFU, Evidence.BALANCE, Evidence.COMPLETION, Evidence.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Climb:
    """How a server gets onto a rung, and what that costs it."""

    evidence: Evidence
    needs: str
    since: str
    cost: str
    gives: str


CLIMBS: Final = (
    Climb(
        Evidence.PLUGIN,
        "stallwatch importable in vLLM's Python environment and --enable-logging-iteration-details",
        "0.26",
        "a few microseconds a step; one log line a step unless --disable-log-stats is given too",
        "prompt tokens, decode tokens and duration of every step, exact",
    ),
    Climb(
        Evidence.MFU,
        "--enable-mfu-metrics",
        "0.17",
        "0.07 to 0.5 ms a step in the engine core for 16 to 256 requests, as measured on a slow CPU",
        "prompt tokens between two polls, exact once calibrated",
    ),
    Climb(
        Evidence.BALANCE,
        "nothing but default flags: prefix caching on and a cache that is not hybrid",
        "0.16",
        "nothing",
        "an estimate of the prompt tokens between two polls, and the backlog",
    ),
    Climb(
        Evidence.COMPLETION,
        "nothing",
        "0.8",
        "nothing",
        "prompt tokens when a prefill has ended: right in the long run, silent during a long prompt",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """Sums over the steps of one phase that ended in an interval; tokens and seconds."""

    steps: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    seconds: float = 0.0
    prefill_squares: float = 0.0
    decode_squares: float = 0.0
    seconds_squares: float = 0.0
    prefill_decode: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactSteps:
    """What the plugin says of the steps that ended in an interval."""

    phases: Mapping[str, StepSums]  # decode, mixed, prefill
    prefill_buckets: Buckets | None = None  # steps by prompt tokens, of this interval
    chunks: float | None = None  # prompts times steps

    @property
    def steps(self) -> float:
        """Steps of all phases."""
        return sum(sums.steps for sums in self.phases.values())

    @property
    def prefill(self) -> float:
        """Prompt tokens of all phases."""
        return sum(sums.prefill for sums in self.phases.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillInterval:
    """The answer for one interval of one engine; `since` and `until` are the times of the two readings, seconds."""

    since: float
    until: float
    evidence: Evidence
    prefill_tokens: float | None
    """Computed by steps of the interval, in tokens; None when nothing is known."""
    exact_steps: ExactSteps | None
    backlog_tokens: float | None
    """Uncomputed tokens of admitted prompts at `until`."""
    backlog_eta: float | None
    """Seconds until they are computed, at the pace seen; None while no pace is known."""
    balance: BalanceInterval | None
    mfu: MfuInterval | None
    estimates: Mapping[Evidence, float]
    """What each rung says, for comparison; never mixed."""


class PrefillLadder:
    """Follows one engine from scrape to scrape."""

    def __init__(self) -> None:
        self._cache: CacheFacts | None = None
        self._balance: BalanceEstimator | None = None
        self._mfu = MfuEstimator()
        self._pace = PrefillPace()
        self._last: EngineCounters | None = None
        self._at = 0.0
        self._restart()

    def _restart(self) -> None:
        self._mfu.reset()
        self._pace = PrefillPace()
        self._hits = 0.0
        self._still = dict.fromkeys((Evidence.PLUGIN, Evidence.MFU), _PATIENCE)
        self._done = 0.0
        self._open = 0.0
        self._worked_since: float | None = None
        if self._balance is not None:
            self._balance.reset()

    def scraped(
        self, counters: EngineCounters, at: float, *, cache: CacheFacts | None = None
    ) -> PrefillInterval | None:
        """Takes a scrape of the estimator's lane; None for the first, after a restart, and for a smaller lane.

        Args:
            counters: The engine's counters.
            at: When they were read, seconds.
            cache: The engine's cache layout, once known.
        """
        if cache is not None and cache != self._cache:
            self._cache = cache
            self._balance = BalanceEstimator(cache)
        before, since = self._last, self._at
        if before is not None and before.first_tokens is not None and counters.first_tokens is None:
            return None
        self._last, self._at = counters, at
        if before is None:
            return None
        if was_reset(before, counters):
            self._restart()
            return None
        balance = self._balance.update(before, counters) if self._balance is not None else None
        mfu = self._mfu.update(before, counters)
        exact = _exact(before.plugin, counters.plugin)
        booked = self._booked(before, counters)
        estimates: dict[Evidence, float] = {}
        worked = _worked(before, counters)
        if exact is not None and self._moves(Evidence.PLUGIN, moved=exact.steps > 0, worked=worked):
            estimates[Evidence.PLUGIN] = exact.prefill
        written = delta(before.write_bytes, counters.write_bytes)
        if self._moves(Evidence.MFU, moved=bool(written), worked=worked) and mfu is not None:
            estimates[Evidence.MFU] = mfu.prefill_tokens
        if balance is not None and balance.trusted:
            estimates[Evidence.BALANCE] = balance.prefill_tokens
        elif balance is not None:
            # What was booked contradicts what was announced: whatever else the page implies is not to be believed.
            booked = None
        if booked is not None:
            estimates[Evidence.COMPLETION] = booked
        evidence = next((rung for rung in LADDER if rung in estimates), Evidence.UNKNOWN)
        tokens = estimates.get(evidence)
        known = exact if evidence is Evidence.PLUGIN else None
        backlog, eta = self._backlog(before, counters, balance, known, tokens, at)
        return PrefillInterval(
            since=since,
            until=at,
            evidence=evidence,
            prefill_tokens=tokens,
            exact_steps=known,
            backlog_tokens=backlog,
            backlog_eta=eta,
            balance=balance,
            mfu=mfu,
            estimates=estimates,
        )

    def _moves(self, rung: Evidence, *, moved: bool, worked: bool) -> bool:
        """Whether the rung's figures keep up with the engine; at first they have to prove it."""
        if moved:
            self._still[rung] = 0
        elif worked:
            self._still[rung] += 1
        return self._still[rung] < _PATIENCE

    def _booked(self, before: EngineCounters, after: EngineCounters) -> float | None:
        computed = delta(before.prompt_local_compute, after.prompt_local_compute)
        if computed is not None:
            return computed
        prompt = delta(before.prompt_tokens, after.prompt_tokens)
        if prompt is None:
            return None
        # Older servers book whole prompts when they end, and their cached part when they begin.
        self._hits += delta(before.prefix_hits, after.prefix_hits) or 0.0
        cached = min(self._hits, prompt)
        self._hits -= cached
        return prompt - cached

    def _backlog(
        self,
        before: EngineCounters,
        after: EngineCounters,
        balance: BalanceInterval | None,
        exact: ExactSteps | None,
        tokens: float | None,
        at: float,
    ) -> tuple[float | None, float | None]:
        if balance is None or not balance.trusted or tokens is None:
            return None, None
        booked = delta(before.prompt_local_compute, after.prompt_local_compute) or 0.0
        was_done, was_to_go = self._done, self._open - self._done
        # How much work is open is booked to the token; how much of it is done comes from the best evidence.
        self._open = balance.open_tokens
        self._done = min(max(0.0, was_done + tokens - booked), self._open)
        if balance.aborted_tokens > 0 or balance.parked:
            self._done = min(self._done, max(0.0, self._open - balance.backlog_tokens))
        backlog = self._open - self._done
        if tokens > 0:
            took = self._took(before, after, exact, at)
            if took is not None:
                middle = tokens / 2 if booked > 0 else was_done + tokens / 2
                pure = was_to_go > 0 and backlog > 0 and booked == 0
                self._pace.add(Stretch(middle, tokens, took), pure=pure)
            self._worked_since = at
        elif self._open <= 0 or backlog <= 0:
            self._worked_since = None
        return backlog, self._pace.eta(self._done, backlog)

    def _took(self, before: EngineCounters, after: EngineCounters, exact: ExactSteps | None, at: float) -> float | None:
        """Seconds of the steps with prompt tokens that ended in an interval.

        Without the plugin those are all steps of the interval: right while a prompt is open from end to end.
        """
        if exact is not None:
            return sum(sums.seconds for phase, sums in exact.phases.items() if phase != "decode")
        # Time is booked to the step's end, and a step may span polls: it ran since the last one that brought tokens.
        itl, steps = delta(before.itl_count, after.itl_count), delta(before.iterations, after.iterations)
        seconds = delta(before.itl_sum, after.itl_sum)
        if itl and steps and seconds and itl >= steps:
            return seconds / itl * steps
        return None if self._worked_since is None else at - self._worked_since


def _worked(before: EngineCounters, after: EngineCounters) -> bool:
    """Whether a step with output ended."""
    return bool(delta(before.iterations, after.iterations) or delta(before.generation_tokens, after.generation_tokens))


_PLUGIN: Final = "stallwatch_plugin_"
_TERMS: Final = {
    "n": "steps",
    "p": "prefill",
    "d": "decode",
    "t": "seconds",
    "pp": "prefill_squares",
    "dd": "decode_squares",
    "tt": "seconds_squares",
    "pd": "prefill_decode",
    "pt": "prefill_seconds",
    "dt": "decode_seconds",
}


def _exact(before: Mapping[str, float], after: Mapping[str, float]) -> ExactSteps | None:
    """The plugin's figures of an interval; None when it is not there or was restarted."""
    phases: dict[str, dict[str, float]] = {}
    edges: list[tuple[float, float]] = []
    chunks: float | None = None
    for key, value in after.items():
        name, _, rest = key.removeprefix(_PLUGIN).partition("{")
        if name not in {"step_moments_total", "step_prefill_tokens_bucket", "prefill_chunks_total"}:
            continue
        grown = delta(before.get(key), value)
        if grown is None:
            return None
        labels = _labels(rest)
        if name == "step_moments_total":
            term = _TERMS.get(labels.get("term", ""))
            if term is not None:
                phases.setdefault(labels.get("phase", ""), {})[term] = grown
        elif name == "step_prefill_tokens_bucket":
            edges.append((float(labels.get("le", "inf")), grown))
        else:
            chunks = grown
    if not phases:
        return None
    edges.sort()
    return ExactSteps(
        phases={phase: StepSums(**sums) for phase, sums in phases.items()},
        prefill_buckets=Buckets(tuple(e for e, _ in edges), tuple(c for _, c in edges)) if edges else None,
        chunks=chunks,
    )


def _labels(text: str) -> dict[str, str]:
    """Labels of a key; the plugin's own label values hold neither quotes nor commas."""
    pairs = (pair.partition("=") for pair in text.rstrip("}").split(",") if pair)
    return {name: value.strip('"') for name, _, value in pairs}
