"""One run as figures: what readers felt, what the engine did, what was around. Pure; one clock for all of it.

Judged from the moment on at which the long prompt was sent, or would have been. Gaps that our own lateness explains
are left out and counted; a run with a pause of our own making is void.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from types import MappingProxyType
from typing import Final

from stallwatch.analysis.causes import Cause, StallKind
from stallwatch.analysis.itl import MINIMUM_TOKENS, QUANTILES, Gap, GapWindow
from stallwatch.analysis.observer import ObserverHistory, comparable
from stallwatch.analysis.paired import PairedInterval
from stallwatch.analysis.prefill import LADDER, Evidence
from stallwatch.analysis.quantiles import WeightedQuantiles
from stallwatch.experiment.confirm import Confirmation, Counted, confirm
from stallwatch.experiment.plan import Planned
from stallwatch.experiment.record import Followed, Log, Played

SLOW_FACTOR: Final = 3.0
"""Times the usual gap from which on a gap counts as slow."""
SLOW_LEAST: Final = 0.01
"""Seconds beyond the usual gap that a slow one has at least."""

_EVER: Final = 1e9  # seconds: the whole run is one window
_OURS_SHARE: Final = 0.02  # of the gaps of a run
_OURS_SECONDS: Final = 0.1  # a stream


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a run: its name in JSON, for people, and its unit."""

    name: str
    words: str
    unit: str


MEASURES: Final = (
    Measure("lost_seconds", "seconds that a stream lost in slow gaps", "seconds"),
    Measure("longest_gap_seconds", "longest gap", "seconds"),
    Measure("icl_p50_seconds", "inter-chunk latency p50", "seconds"),
    Measure("icl_p95_seconds", "inter-chunk latency p95", "seconds"),
    Measure("icl_p99_seconds", "inter-chunk latency p99", "seconds"),
    Measure("itl_p50_seconds", "inter-token latency p50", "seconds"),
    Measure("itl_p95_seconds", "inter-token latency p95", "seconds"),
    Measure("itl_p99_seconds", "inter-token latency p99", "seconds"),
    Measure("itl_max_seconds", "inter-token latency max", "seconds"),
    Measure("beside_itl_p99_seconds", "inter-token latency p99 while the prompt was computed", "seconds"),
    Measure("time_weighted_p50_seconds", "time-weighted gap p50", "seconds"),
    Measure("time_weighted_p95_seconds", "time-weighted gap p95", "seconds"),
    Measure("time_weighted_p99_seconds", "time-weighted gap p99", "seconds"),
    Measure("stall_seconds", "stall seconds of a stream", "seconds"),
    Measure("stream_ttft_seconds", "first token of a stream (median)", "seconds"),
    Measure("prompt_ttft_seconds", "first token of the long prompt", "seconds"),
    Measure("decode_step_seconds", "step without prefill", "seconds"),
    Measure("mixed_step_seconds", "step with prefill", "seconds"),
    Measure("longest_step_seconds", "longest step seen alone", "seconds"),
    Measure("steps", "steps", "count"),
    Measure("prefill_tokens", "prefill tokens by the steps' evidence", "tokens"),
    Measure("prefill_tokens_per_step", "prefill tokens in a step with prefill", "tokens"),
    Measure("prompt_tokens", "tokens of the long prompt", "tokens"),
    Measure("cached_tokens", "of these from the prefix cache", "tokens"),
    Measure("computed_tokens", "of these computed", "tokens"),
    Measure("running", "requests running, most", "requests"),
    Measure("waiting", "requests waiting, most", "requests"),
    Measure("kv_usage", "KV cache in use, most", "ratio"),
    Measure("preemptions", "preemptions", "count"),
    Measure("output_tokens_per_second", "output tokens a second", "tokens_per_second"),
    Measure("total_tokens_per_second", "prompt and output tokens a second", "tokens_per_second"),
    Measure("gpu_utilization", "GPU utilisation", "ratio"),
    Measure("gpu_sm_clock_hertz", "SM clock", "hertz"),
    Measure("gpu_sm_clock_min_hertz", "SM clock, lowest", "hertz"),
    Measure("gpu_sm_clock_beside_hertz", "SM clock while the prompt was computed", "hertz"),
    Measure("gpu_power_watts", "GPU power", "watts"),
    Measure("host_cpu_pressure", "host: tasks waited for CPU", "ratio"),
    Measure("host_memory_pressure", "host: tasks waited for memory", "ratio"),
    Measure("host_io_pressure", "host: tasks waited for disk", "ratio"),
    Measure("engine_throttled_seconds", "vLLM's container not allowed to run", "seconds"),
    Measure("observer_lag_seconds", "our own lateness, worst", "seconds"),
    Measure("observer_excluded_gaps", "gaps left out for it", "count"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A run as it was taken down, before it is judged."""

    planned: Planned
    played: Played
    log: Log
    counted: Counted
    ended: float  # when the last figures about it were read
    problems: tuple[str, ...] = ()  # what went wrong around it
    engine: str = "0"  # data-parallel rank that all requests went to


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """What readers are used to, and from where on a gap is more than that. Seconds."""

    usual: float
    stall_floor: float
    stall_factor: float

    @property
    def slow(self) -> float:
        """A gap above it is slow."""
        return max(SLOW_FACTOR * self.usual, self.usual + SLOW_LEAST)

    @property
    def stall(self) -> float:
        """A gap above it is a stall."""
        return max(self.stall_floor, self.stall_factor * self.usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, judged. A measure that is not known is absent."""

    taken: Taken
    measures: Mapping[str, float]
    confirmation: Confirmation
    evidence: Evidence
    causes: Mapping[Cause, float]
    """Stall seconds of this run by the cause that the monitor named."""
    inside: float | None
    """Share of the seconds lost that lies between the prompt's sending and its first token; None where none were."""
    void: tuple[str, ...] = ()

    @property
    def planned(self) -> Planned:
        """What it was meant to be."""
        return self.taken.planned


def usual_gap(runs: Iterable[Taken]) -> float | None:
    """The median gap of streams that are alone; without such a run, of the streams before the prompt. Seconds."""
    found = list(runs)
    alone = [gap for taken in found if taken.planned.prompt_tokens is None for gap in _gaps(taken)]
    if alone:
        return median(gap.seconds for gap in alone)
    before = [
        at - last
        for taken in found
        for reader in taken.played.readers
        for (last, _), (at, _) in pairwise(reader.arrivals)
        if taken.played.marked is None or at <= taken.played.marked
    ]
    return median(before) if before else None


def measured(taken: Taken, threshold: Threshold, *, allow_busy: bool) -> Run:
    """Judges a run."""
    played = taken.played
    own = ObserverHistory()
    for sample in taken.log.lags:
        own.add(sample)
    gaps = list(_gaps(taken))
    ours = [gap for gap in gaps if comparable(gap.seconds, own.lag_within(gap.start, gap.end))]
    excluded = set(map(id, ours))
    counted = [gap for gap in gaps if id(gap) not in excluded]
    confirmation = confirm(taken.planned, played, taken.counted, allow_busy=allow_busy)
    slow = [gap for gap in counted if gap.seconds > threshold.slow]
    lost = sum(gap.seconds - threshold.usual for gap in slow)
    spans = _computing(played)
    inside = sum(gap.seconds - threshold.usual for gap in slow if spans and gap.start < spans[1] and gap.end > spans[0])
    figures = {
        **_felt(counted, played, threshold),
        **_work(taken),
        **_state(taken, confirmation),
        **_around(taken),
        "observer_lag_seconds": max((lag.lag for lag in taken.log.lags), default=None),
        "observer_excluded_gaps": float(len(ours)),
    }
    evidence = [interval.evidence for interval in taken.log.prefill]
    return Run(
        taken=taken,
        measures=MappingProxyType({name: value for name, value in figures.items() if value is not None}),
        confirmation=confirmation,
        evidence=max(evidence, key=LADDER.index, default=Evidence.UNKNOWN),
        causes=_causes(taken),
        inside=inside / lost if lost > 0 else None,
        void=tuple(_void(taken, confirmation, gaps=gaps, ours=ours)),
    )


def _gaps(taken: Taken) -> Iterator[Gap]:
    """The gaps that ended after the mark, in the order of their ends."""
    marked = taken.played.marked
    if marked is None:
        return
    found = [
        Gap(before, at, tokens)
        for reader in taken.played.readers
        for (before, _), (at, tokens) in pairwise(reader.arrivals)
        if at > marked
    ]
    yield from sorted(found, key=lambda gap: gap.end)


def _computing(played: Played) -> tuple[float, float] | None:
    """From the sending of the prompt to its first token."""
    prompt = played.prompt
    if prompt is None or prompt.sent_at is None:
        return None
    first = prompt.first_token_at
    return prompt.sent_at, played.ended if first is None else first


def _felt(gaps: Sequence[Gap], played: Played, threshold: Threshold) -> dict[str, float | None]:
    """What the streams got."""
    window, each = GapWindow(_EVER), WeightedQuantiles()
    beside = WeightedQuantiles()
    spans = _computing(played)
    for gap in gaps:
        window.add(gap)
        each.add(gap.seconds, 1)
        if spans is not None and gap.start < spans[1] and gap.end > spans[0]:
            beside.add(gap.seconds / gap.tokens, gap.tokens)
    seen = window.at(played.ended)
    streams = len(played.readers)
    found: dict[str, float | None] = {}
    for q in QUANTILES:
        name = f"p{q * 100:.0f}_seconds"
        found[f"icl_{name}"] = each.quantile(q) if len(each) >= MINIMUM_TOKENS[q] else None
        found[f"itl_{name}"] = seen.itl.get(q)
        found[f"time_weighted_{name}"] = seen.time_weighted.get(q)
    found["longest_gap_seconds"] = max((gap.seconds for gap in gaps), default=None)
    found["itl_max_seconds"] = max((gap.seconds / gap.tokens for gap in gaps), default=None)
    # The few gaps beside a prompt are its whole effect: no minimum, its p99 may well be their maximum.
    found["beside_itl_p99_seconds"] = beside.quantile(0.99)
    for name, least in (("lost_seconds", threshold.slow), ("stall_seconds", threshold.stall)):
        found[name] = sum(gap.seconds - threshold.usual for gap in gaps if gap.seconds > least) / streams
    if not gaps:
        found["lost_seconds"] = found["stall_seconds"] = None
    firsts = [wait for reader in played.readers if (wait := reader.time_to_first_token) is not None]
    found["stream_ttft_seconds"] = median(firsts) if firsts else None
    found["prompt_ttft_seconds"] = played.prompt.time_to_first_token if played.prompt is not None else None
    return found


def _work(taken: Taken) -> dict[str, float | None]:
    """What the engine's steps did, by the best evidence."""
    found: dict[str, float | None] = {}
    marked = taken.played.marked
    intervals = [seen for seen in taken.log.paired if marked is not None and seen.until > marked]
    if not intervals:
        return found
    found["steps"] = sum(seen.steps for seen in intervals)
    clean = [seen for seen in intervals if seen.decoding_only and seen.steps]
    steps = sum(seen.steps for seen in clean)
    decode = sum(seen.seconds for seen in clean) / steps if steps else None
    found["decode_step_seconds"] = decode
    own = {seen.until: _own_prefill(seen, taken.played.readers) for seen in intervals}
    known = [max(0.0, seen.prefill - own[seen.until]) for seen in intervals if seen.prefill is not None]
    found["prefill_tokens"] = sum(known) if known else None
    exact = [
        sums
        for seen in intervals
        if seen.exact is not None and not own[seen.until] and (sums := seen.exact.phases.get("mixed"))
    ]
    mixed = [seen for seen in intervals if seen.prefill and seen.mixed and not own[seen.until]]
    if exact and (count := sum(sums.steps for sums in exact)):
        found["mixed_step_seconds"] = sum(sums.seconds for sums in exact) / count
        found["prefill_tokens_per_step"] = sum(sums.prefill for sums in exact) / count
    elif mixed and decode is not None:
        count = sum(seen.mixed for seen in mixed)
        found["mixed_step_seconds"] = decode + sum(seen.excess(decode) for seen in mixed) / count
        found["prefill_tokens_per_step"] = sum(seen.prefill or 0.0 for seen in mixed) / count
    found["longest_step_seconds"] = max((seen.seconds for seen in intervals if seen.single), default=None)
    return found


def _own_prefill(interval: PairedInterval, readers: Sequence[Followed]) -> float:
    """Tokens of the streams' own prompts that were computed in an interval, which may reach back beyond the mark."""
    return sum(
        float(reader.closed.prompt_tokens)
        for reader in readers
        if reader.closed is not None
        and reader.closed.prompt_tokens is not None
        and reader.first_token_at is not None
        and interval.since < reader.first_token_at <= interval.until
    )


def _state(taken: Taken, confirmation: Confirmation) -> dict[str, float | None]:
    played = taken.played
    engine = [seen.engines[taken.engine] for seen in taken.log.scrapes if taken.engine in seen.engines]
    seconds = played.ended - played.marked if played.marked is not None else 0.0
    output = sum(
        tokens
        for request in (*played.readers, *([played.prompt] if played.prompt is not None else []))
        for at, tokens in request.arrivals
        if played.marked is not None and at > played.marked
    )
    prompt, cached = confirmation.prompt_tokens, confirmation.cached_tokens
    return {
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "computed_tokens": confirmation.computed_tokens,
        "running": _most(counters.running for counters in engine),
        "waiting": _most(counters.waiting for counters in engine),
        "kv_usage": _most(counters.kv_usage for counters in engine),
        "preemptions": taken.counted.preemptions,
        "output_tokens_per_second": output / seconds if seconds > 0 else None,
        "total_tokens_per_second": (output + (prompt or 0)) / seconds if seconds > 0 else None,
    }


def _around(taken: Taken) -> dict[str, float | None]:
    readings = [reading for seen in taken.log.gpus for reading in seen.gpus]
    spans = _computing(taken.played)
    beside = [
        reading.sm_clock
        for seen in taken.log.gpus
        for reading in seen.gpus
        if spans is not None and spans[0] <= seen.at <= spans[1]
    ]
    host = taken.log.host
    found = {
        "gpu_utilization": _mean(reading.utilization for reading in readings),
        "gpu_sm_clock_hertz": _mean(reading.sm_clock for reading in readings),
        "gpu_sm_clock_min_hertz": min(
            (reading.sm_clock for reading in readings if reading.sm_clock is not None), default=None
        ),
        "gpu_sm_clock_beside_hertz": _mean(beside),
        "gpu_power_watts": _mean(reading.power for reading in readings),
    }
    if len(host) >= 2 and host[-1].at > host[0].at:
        first, last = host[0], host[-1]
        for resource in ("cpu", "memory", "io"):
            key = (resource, "some")
            if key in first.pressure_seconds and key in last.pressure_seconds:
                risen = max(0.0, last.pressure_seconds[key] - first.pressure_seconds[key])
                found[f"host_{resource}_pressure"] = min(1.0, risen / (last.at - first.at))
        if first.engine_throttled_seconds is not None and last.engine_throttled_seconds is not None:
            found["engine_throttled_seconds"] = max(0.0, last.engine_throttled_seconds - first.engine_throttled_seconds)
    return found


def _causes(taken: Taken) -> Mapping[Cause, float]:
    """Of stalls of streams that were decoding; a stall that reaches into another run counts where most of it lies."""
    found: Counter[Cause] = Counter()
    for stall in taken.log.stalls:
        if stall.kind is StallKind.ADMISSION:
            continue
        end = stall.end if stall.end is not None else taken.ended
        length = end - stall.start
        overlap = min(end, taken.ended) - max(stall.start, taken.played.began)
        if length <= 0 or overlap >= length / 2:
            found[stall.cause] += stall.seconds  # type: ignore[assignment]  # a Counter may hold seconds
    return dict(found)


def _void(taken: Taken, confirmation: Confirmation, *, gaps: Sequence[Gap], ours: Sequence[Gap]) -> Iterator[str]:
    played = taken.played
    yield from taken.problems
    failed = [reader for reader in played.readers if reader.problem]
    if failed:
        yield f"{len(failed)} of {len(played.readers)} streams failed; the first {failed[0].problem}"
    if played.prompt is not None and played.prompt.problem:
        yield f"the long prompt {played.prompt.problem}"
    if taken.log.restarts:
        yield "the server restarted"
    if failed or (played.prompt is not None and played.prompt.problem):
        return
    if played.marked is None:
        yield "the streams ended before they had settled: ask for more output tokens"
        return
    first = played.prompt.first_token_at if played.prompt is not None else None
    if first is not None and any(reader.arrivals[-1][0] < first for reader in played.readers):
        yield "streams ended before the prompt was computed: ask for more output tokens"
    late = sum(gap.seconds for gap in ours) / len(played.readers)
    if late > _OURS_SECONDS or len(ours) > _OURS_SHARE * len(gaps):
        yield f"we were late ourselves: {len(ours)} of {len(gaps)} gaps, {late:.2f} s a stream"
    yield from confirmation.problems


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
