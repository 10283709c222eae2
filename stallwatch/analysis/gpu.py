"""What the GPUs did: clocks by the second, and whether one runs slower than it usually does when it is busy.

A clock event reason is no evidence by itself: under load a GPU at its power limit always shows one, while its clock
stays where it always is. What counts is the clock against the GPU's own past under work.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from stallwatch.observations import GpuReading, GpuSample

_KEPT_SECONDS = 300.0
_KEPT_SAMPLES = 6000  # of one GPU
_BASELINE_SECONDS = 900  # one entry a second
_BASELINE_LEAST = 30
_CHAINED_SECONDS = 2.5
_BUSY = 0.5
_MOST_GPUS = 64


@dataclass(frozen=True, slots=True)
class Clock:
    """The SM clock over some time, in hertz."""

    low: float
    mean: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpan:
    """One GPU over a stretch of time; what is not known is None."""

    gpu: str
    uuid: str
    samples: int
    sm_clock: Clock | None = None
    clock_ratio: float | None = None  # mean SM clock while busy, to the busy baseline
    busy_ratio: float | None = None  # share of the samples in which the GPU was busy
    power: float | None = None  # mean watts
    reasons: frozenset[str] | None = None  # every clock event reason that was seen


@dataclass(slots=True)
class _Track:
    """The past of one GPU."""

    uuid: str
    samples: deque[tuple[float, GpuReading]] = field(default_factory=lambda: deque(maxlen=_KEPT_SAMPLES))
    second: int | None = None  # the second that is being filled
    clocks: list[float] = field(default_factory=list)
    busy: bool = True
    busy_before: bool = False
    baseline: deque[float] = field(default_factory=deque)
    ordered: list[float] = field(default_factory=list)  # the same numbers by size

    def add(self, at: float, reading: GpuReading) -> None:
        followed = bool(self.samples) and at - self.samples[-1][0] <= _CHAINED_SECONDS
        self.samples.append((at, reading))
        while self.samples[0][0] < at - _KEPT_SECONDS:
            self.samples.popleft()
        second = int(at // 1)
        if second != self.second:
            self._close(followed=followed)
            self.second = second
        if reading.sm_clock is not None:
            self.clocks.append(reading.sm_clock)
        self.busy = self.busy and is_busy(reading) is True

    def _close(self, *, followed: bool) -> None:
        """Books a full second. The first busy one after idleness is left out: the clock is still rising in it."""
        if self.busy and self.busy_before and self.clocks:
            mean = sum(self.clocks) / len(self.clocks)
            self.baseline.append(mean)
            insort(self.ordered, mean)
            if len(self.baseline) > _BASELINE_SECONDS:
                del self.ordered[bisect_left(self.ordered, self.baseline.popleft())]
        self.busy_before = self.busy and bool(self.clocks) and followed
        self.busy = True
        self.clocks.clear()

    @property
    def usual_clock(self) -> float | None:
        return self.ordered[len(self.ordered) // 2] if len(self.ordered) >= _BASELINE_LEAST else None

    def within(self, start: float, end: float) -> list[tuple[float, GpuReading]]:
        picked = []
        for at, reading in reversed(self.samples):
            if at <= start:
                break
            if at <= end:
                picked.append((at, reading))
        picked.reverse()
        return picked


class GpuHistory:
    """The GPUs over the last five minutes, and the clock each of them usually has under work.

    The usual clock is the median over the last busy seconds, at least 30 and at most 900 of them: a fall has to last
    longer than half of that before it counts as usual. It belongs to a UUID and outlives gaps in the polling. With more
    than 2.5 s between two polls it stays unknown.
    """

    def __init__(self) -> None:
        self._tracks: dict[tuple[str, str], _Track] = {}
        self.latest: GpuSample | None = None

    def add(self, sample: GpuSample) -> None:
        """Takes in one poll; polls arrive in the order of their times."""
        self.latest = sample
        for reading in sample.gpus:
            key = (reading.gpu, reading.uuid)
            track = self._tracks.get(key)
            if track is None:
                if len(self._tracks) >= _MOST_GPUS:
                    del self._tracks[min(self._tracks, key=lambda known: self._tracks[known].samples[-1][0])]
                track = self._tracks[key] = _Track(reading.uuid)
            track.add(sample.at, reading)

    def spans(self, start: float, end: float) -> tuple[GpuSpan, ...]:
        """Every GPU that was read in (start, end]."""
        return tuple(self._spans(start, end))

    def last_second(self) -> tuple[GpuSpan, ...]:
        """Every GPU over the second that ends with the latest poll."""
        return () if self.latest is None else self.spans(self.latest.at - 1.0, self.latest.at)

    def worst_clock_ratio(self, start: float, end: float) -> float | None:
        """The lowest clock of any busy GPU in (start, end], to its own usual one; None when none is known.

        The engine waits for its slowest GPU, so one that fell is enough.
        """
        return min((span.clock_ratio for span in self._spans(start, end) if span.clock_ratio is not None), default=None)

    def usual_clock(self, gpu: str) -> float | None:
        """The SM clock in hertz that a GPU usually has under work; None until known."""
        known = [track.usual_clock for (name, _), track in self._tracks.items() if name == gpu]
        return known[-1] if known else None

    def _spans(self, start: float, end: float) -> Iterator[GpuSpan]:
        for (gpu, uuid), track in self._tracks.items():
            picked = track.within(start, end)
            if picked:
                yield _span(gpu, uuid, picked, track.usual_clock)


def is_busy(reading: GpuReading) -> bool | None:
    """Whether a GPU works; None when the device does not tell.

    A GPU that is partitioned gives no utilisation; that its clocks have no reason to idle says the same, more coarsely.
    """
    if reading.utilization is not None:
        return reading.utilization >= _BUSY
    if reading.clock_event_reasons is not None:
        return "gpu_idle" not in reading.clock_event_reasons
    return None


def _span(gpu: str, uuid: str, picked: list[tuple[float, GpuReading]], usual: float | None) -> GpuSpan:
    clocks = [reading.sm_clock for _, reading in picked if reading.sm_clock is not None]
    busy_clocks = [
        reading.sm_clock for _, reading in picked if reading.sm_clock is not None and is_busy(reading) is True
    ]
    told = [busy for _, reading in picked if (busy := is_busy(reading)) is not None]
    reasons = [reading.clock_event_reasons for _, reading in picked if reading.clock_event_reasons is not None]
    return GpuSpan(
        gpu=gpu,
        uuid=uuid,
        samples=len(picked),
        sm_clock=Clock(min(clocks), _mean(clocks), max(clocks)) if clocks else None,
        # Idle clocks fall because nothing is asked of them.
        clock_ratio=_mean(busy_clocks) / usual if busy_clocks and usual else None,
        busy_ratio=sum(told) / len(told) if told else None,
        power=_mean_power(picked),
        reasons=frozenset().union(*reasons) if reasons else None,
    )


def _mean_power(picked: list[tuple[float, GpuReading]]) -> float | None:
    """From the energy counter, which misses nothing between two polls; else the mean of what the polls saw."""
    metered = [(at, reading.energy) for at, reading in picked if reading.energy is not None]
    seconds = joules = 0.0
    for (before, low), (after, high) in pairwise(metered):
        # A counter that fell was reset with the driver.
        if high >= low:
            seconds += after - before
            joules += high - low
    if seconds > 0:
        return joules / seconds
    drawn = [reading.power for _, reading in picked if reading.power is not None]
    return _mean(drawn) if drawn else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
