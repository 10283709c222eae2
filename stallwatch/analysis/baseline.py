"""How long a step takes when it only decodes: the level that every slowdown is measured from.

It depends on how many requests decode together, so it is kept by powers of two of them. Only intervals without prefill
teach it. It belongs to one server process, since a restart may bring another model; and it is forgotten over a quarter
of an hour, since contexts grow. Beside it stands its own slow past, for a server that became slower for good: that is a
shift, not a stall.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from stallwatch.analysis.quantiles import WeightedQuantiles

MEMORY: Final = 900.0
"""Seconds after which a clean interval is forgotten."""
LEAST_SAMPLES: Final = 30
"""Clean intervals of a bucket below which the fitted line answers for it."""
_LEAST_STEPS: Final = 30
"""Steps below which there is no line."""
_LEAST_SPREAD: Final = 0.05
"""Variance of the number of decoders below which its influence cannot be told."""
_PAUSE: Final = 10.0
"""Seconds: a longer silence makes what the line knows no older than this."""
_ODD: Final = 4.0
"""Times the line above which a sample is a pause and not a level, unless they keep coming."""
_PATIENCE: Final = 20
_PAST: Final = 96
"""Medians of a quarter of an hour that make up the slow past: a day of work."""


def bucket_of(decoders: float) -> int:
    """The bucket of a number of decoders: 0 for 1, 1 for 2, 2 for 3-4, 3 for 5-8, and so on."""
    return (max(1, round(decoders)) - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSums:
    """Sums over prefill-free steps: n = steps, d = decoders, t = seconds, two letters their product."""

    n: float
    d: float
    t: float
    dd: float
    dt: float
    tt: float

    @classmethod
    def of_interval(cls, steps: float, decoders: float, seconds: float) -> "DecodeSums":
        """An interval's sums when only the means of its steps are known."""
        each = seconds / steps
        return cls(
            n=steps,
            d=steps * decoders,
            t=seconds,
            dd=steps * decoders**2,
            dt=decoders * seconds,
            tt=each * seconds,
        )


@dataclass(slots=True)
class DecodeLine:
    """The least-squares line t = a + c*d through prefill-free steps, older ones counting less and less."""

    n: float = 0.0
    d: float = 0.0
    t: float = 0.0
    dd: float = 0.0
    dt: float = 0.0
    tt: float = 0.0
    _at: float | None = None
    _odd: int = 0

    def add(self, at: float, sums: DecodeSums) -> None:
        """Takes the prefill-free steps of an interval that ended at `at`."""
        if sums.n <= 0:
            return
        expected = self.seconds(sums.d / sums.n)
        if expected is not None and sums.t > _ODD * expected * sums.n:
            self._odd += 1
            if self._odd < _PATIENCE:
                return
            self.n = self.d = self.t = self.dd = self.dt = self.tt = 0.0
        self._odd = 0
        keep = 1.0 if self._at is None else 0.5 ** (min(max(0.0, at - self._at), _PAUSE) / MEMORY)
        self._at = at
        self.n = self.n * keep + sums.n
        self.d = self.d * keep + sums.d
        self.t = self.t * keep + sums.t
        self.dd = self.dd * keep + sums.dd
        self.dt = self.dt * keep + sums.dt
        self.tt = self.tt * keep + sums.tt

    @property
    def fit(self) -> tuple[float, float | None] | None:
        """(a, c) in seconds and seconds a decoder, c None if the decoders never varied; None while too little is known.

        A negative slope is noise: more decoders do not make a step shorter.
        """
        if self.n < _LEAST_STEPS:
            return None
        mean_d, mean_t = self.d / self.n, self.t / self.n
        spread = self.dd / self.n - mean_d**2
        if spread < _LEAST_SPREAD:
            return mean_t, None
        slope = max(0.0, (self.dt / self.n - mean_d * mean_t) / spread)
        return mean_t - slope * mean_d, slope

    def seconds(self, decoders: float) -> float | None:
        """A step with so many decoders and no prefill; None where nothing of the kind was seen."""
        return self.along(self.fit, decoders)

    def along(self, fit: tuple[float, float | None] | None, decoders: float) -> float | None:
        """The same by a fit that was just made, for many at once."""
        if fit is None:
            return None
        base, slope = fit
        if slope is None:
            return base if bucket_of(decoders) == bucket_of(self.d / self.n) else None
        return max(base + slope * decoders, 0.0) or None

    def squared_error(self) -> float:
        """Sum of squared residuals over the steps remembered, seconds squared."""
        fit = self.fit
        if fit is None:
            return 0.0
        a, c = fit[0], fit[1] or 0.0
        error = self.tt - 2 * a * self.t - 2 * c * self.dt + self.n * a * a + 2 * a * c * self.d + c * c * self.dd
        return max(0.0, error)


@dataclass(slots=True)
class _Bucket:
    steps: WeightedQuantiles = field(default_factory=WeightedQuantiles)
    samples: int = 0
    past: deque[float] = field(default_factory=lambda: deque(maxlen=_PAST))


class DecodeBaseline:
    """Median duration of a decode step by number of decoders, of one engine."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._samples: deque[tuple[float, int, float, int]] = deque()  # (at, bucket, seconds, steps)
        self._line = DecodeLine()
        self._marked: float | None = None

    def add(self, at: float, decoders: float, seconds: float, steps: float) -> None:
        """Takes an interval without prefill: `steps` steps that took `seconds` together."""
        if steps < 1 or seconds <= 0:
            return
        self.forget(at)
        index, each, weight = bucket_of(decoders), seconds / steps, round(steps)
        bucket = self._buckets.setdefault(index, _Bucket())
        bucket.steps.add(each, weight)
        bucket.samples += 1
        self._samples.append((at, index, each, weight))
        self._line.add(at, DecodeSums.of_interval(steps, decoders, seconds))

    def forget(self, now: float) -> None:
        """Drops what is too old, and writes the quarter of an hour down in the slow past when one is over."""
        if self._marked is None:
            self._marked = now
        if now - self._marked >= MEMORY:
            self._marked = now
            for bucket in self._buckets.values():
                typical = bucket.steps.quantile(0.5) if bucket.samples >= LEAST_SAMPLES else None
                if typical is not None:
                    bucket.past.append(typical)
        while self._samples and self._samples[0][0] <= now - MEMORY:
            _, index, each, weight = self._samples.popleft()
            self._buckets[index].steps.remove(each, weight)
            self._buckets[index].samples -= 1

    def restart(self) -> None:
        """The server is another process: its past stays for comparison, its level is learned anew."""
        for bucket in self._buckets.values():
            bucket.steps, bucket.samples = WeightedQuantiles(), 0
        self._samples.clear()
        self._line = DecodeLine()
        self._marked = None

    def seconds(self, decoders: float) -> float | None:
        """Duration of a step with so many decoders and no prefill; None until known."""
        bucket = self._buckets.get(bucket_of(decoders))
        if bucket is not None and bucket.samples >= LEAST_SAMPLES:
            return bucket.steps.quantile(0.5)
        return self._line.seconds(decoders)

    def reference(self, decoders: float) -> float | None:
        """What it was over the last day of work; None before the first quarter of an hour is over."""
        bucket = self._buckets.get(bucket_of(decoders))
        return median(bucket.past) if bucket is not None and bucket.past else None
