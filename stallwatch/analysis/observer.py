"""Whether we were late ourselves: an observer that was late must not blame the observed."""

from collections import deque

from stallwatch.observations import ObserverSample

_KEPT_SECONDS = 900.0
_KEPT_SAMPLES = 8192
_LEAST_LAG = 0.02
_SHARE = 0.5


class ObserverHistory:
    """Our own lateness over the last 15 minutes."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=_KEPT_SAMPLES)  # (from, to, lag)

    def add(self, sample: ObserverSample) -> None:
        """Takes in what the loop's sleeper saw; samples arrive in the order of their times."""
        since = self._samples[-1][1] if self._samples else sample.at
        # The late wake-up itself may reach back beyond the sample before it.
        self._samples.append((min(since, sample.at - sample.lag), sample.at, sample.lag))
        while self._samples[0][1] < sample.at - _KEPT_SECONDS:
            self._samples.popleft()

    @property
    def known_until(self) -> float | None:
        """Until when our lateness is known: a gap that ended later is judged once a sample has come."""
        return self._samples[-1][1] if self._samples else None

    def lag_within(self, start: float, end: float) -> float:
        """Seconds of our worst lateness in any sample that overlaps [start, end]; 0 where nothing is known."""
        worst = 0.0
        for since, until, lag in reversed(self._samples):
            if until < start:
                break
            if since <= end:
                worst = max(worst, lag)
        return worst


def comparable(gap: float, lag: float) -> bool:
    """Whether our own lateness of `lag` seconds may be what made a gap of `gap` seconds long.

    A read is stamped at most one lateness after its bytes arrived, so a gap is wrong by no more than the worst lateness
    around its ends, however often or long we were throttled in between. From half the gap on, what is left after
    taking it off is shorter than what we added: such a gap says more about us than about the server. Lateness under
    20 ms, two rounds of the sleeper, is any loop's daily life: taking out the gaps that meet it would thin out the
    samples without changing a verdict.
    """
    return lag >= _LEAST_LAG and lag >= _SHARE * gap
