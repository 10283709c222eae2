"""What one stream's arrivals come to: waits, quantiles, tokens a chunk. Pure.

Quantiles are those that the sidecar exports, by the same window and with the same minima: a quantile that so few
samples cannot give is absent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

from stallwatch.analysis.itl import MINIMUM_TOKENS, QUANTILES, Gap, GapWindow
from stallwatch.analysis.observer import ObserverHistory, comparable
from stallwatch.analysis.quantiles import WeightedQuantiles
from stallwatch.observations import ObserverSample

_EVER = 1e9  # seconds: the whole stream is one window

Arrival = tuple[float, int]  # when, and how many tokens


@dataclass(frozen=True, slots=True)
class Span:
    """One gap, relative to the sending of the request."""

    at: float  # its end
    seconds: float
    tokens: int
    ours: bool = False  # our own lateness explains it


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One stream, in seconds and tokens; None and absent keys mean "not known"."""

    ttft: float | None = None
    seconds: float = 0.0  # from sending to the end, or to now
    tokens: int = 0
    chunks: int = 0  # socket reads that carried tokens
    most_tokens: int = 0  # in one of them
    gaps: tuple[Span, ...] = ()
    open_gap: float | None = None  # since the last token, or since sending, while more was to come
    icl: Mapping[float, float] = field(default_factory=lambda: MappingProxyType({}))
    itl: Mapping[float, float] = field(default_factory=lambda: MappingProxyType({}))
    time_weighted: Mapping[float, float] = field(default_factory=lambda: MappingProxyType({}))
    icl_max: float | None = None
    itl_max: float | None = None
    excluded: int = 0  # gaps that our own lateness explains; kept out of the quantiles
    lateness: float | None = None  # our own worst while the stream was open

    @property
    def tokens_a_chunk(self) -> float | None:
        """On average."""
        return self.tokens / self.chunks if self.chunks else None

    @property
    def tokens_a_second(self) -> float | None:
        """While it was decoding."""
        later = sum(gap.tokens for gap in self.gaps)
        took = sum(gap.seconds for gap in self.gaps)
        return later / took if took > 0 else None

    @property
    def counted(self) -> tuple[Span, ...]:
        """The gaps that are the server's."""
        return tuple(gap for gap in self.gaps if not gap.ours)


def timing(
    sent_at: float,
    arrivals: Sequence[Arrival],
    *,
    until: float,
    is_open: bool,
    lags: Sequence[ObserverSample] = (),
) -> Timing:
    """Judges a stream that was sent at `sent_at` and followed until `until`; all times of one clock.

    `is_open`: its reader was still waiting for more then.
    """
    own = ObserverHistory()
    for sample in lags:
        own.add(sample)
    gaps = tuple(
        Span(at - sent_at, at - before, tokens, comparable(at - before, own.lag_within(before, at)))
        for (before, _), (at, tokens) in pairwise(arrivals)
    )
    window, each = GapWindow(_EVER), WeightedQuantiles()
    counted = [gap for gap in gaps if not gap.ours]
    for gap in counted:
        window.add(Gap(gap.at - gap.seconds, gap.at, gap.tokens))
        each.add(gap.seconds, 1)
    last = (arrivals[-1][0] if arrivals else sent_at) - sent_at
    ended = until - sent_at
    seen = window.at(ended, last if is_open and arrivals else None)
    return Timing(
        ttft=arrivals[0][0] - sent_at if arrivals else None,
        seconds=ended,
        tokens=sum(tokens for _, tokens in arrivals),
        chunks=len(arrivals),
        most_tokens=max((tokens for _, tokens in arrivals), default=0),
        gaps=gaps,
        open_gap=ended - last if is_open else None,
        icl={q: value for q in QUANTILES if len(each) >= MINIMUM_TOKENS[q] and (value := each.quantile(q)) is not None},
        itl=seen.itl,
        time_weighted=seen.time_weighted,
        icl_max=max((gap.seconds for gap in counted), default=None),
        itl_max=max((gap.seconds / gap.tokens for gap in counted), default=None),
        excluded=len(gaps) - len(counted),
        lateness=max((sample.lag for sample in lags if sample.at >= sent_at), default=None),
    )
