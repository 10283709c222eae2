"""Runs inside vLLM: what every engine step did, exactly, on vLLM's own `/metrics`.

vLLM loads `StepLogger` through the entry point group `vllm.stat_logger_plugins` (0.12 and later) in each API server
process and hands it the scheduler's figures once a step. With `--enable-logging-iteration-details` (in the figures
since 0.26) they include the prompt and decode tokens of the step and its duration. Without, nothing is counted, and
one line in the log says so.

That flag also logs one line a step. `--disable-log-stats` silences the lines and keeps the figures, because any
stat-logger plugin keeps them on; or a `VLLM_LOGGING_CONFIG_PATH` that sets `vllm.v1.metrics.loggers` to WARNING.

An exception in a stat logger would end vLLM's output loop and every request with it, so none leaves this module: they
are counted. It imports nothing else of this project, and nothing that vLLM's image lacks. A step costs about one
microsecond: plain sums here, given to the registry when somebody reads them. With several API servers
(prometheus_client's multiprocess mode) nobody here is asked when a page is made, so the sums are handed over at most
ten times a second and a tenth of a second after the last step; a step that long is always shown at its end.

Under async scheduling the duration is the time that the engine core waited for the step: about its length while the
device is the bottleneck, less when the host is.
"""

import asyncio
import contextlib
import logging
import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    class StatLoggerBase:
        """vLLM's interface of a stat logger, as far as it is used here."""

else:
    try:
        from vllm.v1.metrics.loggers import StatLoggerBase
    except ImportError:

        class StatLoggerBase:
            """Stands in where vLLM is not installed, so that this module can be read and tested there."""


log = logging.getLogger(__name__)

PREFIX: Final = "stallwatch_plugin_"
PHASES: Final = ("decode", "mixed", "prefill")
TERMS: Final = ("n", "p", "d", "t", "pp", "dd", "tt", "pd", "pt", "dt")
"""n steps; p prompt tokens, d decode tokens, t seconds of a step; two letters are a product, summed over steps."""
TOKEN_EDGES: Final = (0.0, *(float(2**power) for power in range(16)))
SECOND_EDGES: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
_T: Final = TERMS.index("t")
_FLUSH_SECONDS: Final = 0.1

_PREFILL: Final = PREFIX + "step_prefill_tokens"
_DECODE: Final = PREFIX + "step_decode_tokens"
_DURATION: Final = PREFIX + "step_duration_seconds"
_MOMENTS: Final = PREFIX + "step_moments"
_CHUNKS: Final = PREFIX + "prefill_chunks"
_ERRORS: Final = PREFIX + "errors"
_INFO: Final = PREFIX + "scheduler_info"

HELP: Final = {
    _PREFILL: "Prompt tokens that one engine step computed.",
    _DECODE: "Decode tokens that one engine step computed.",
    _DURATION: "Duration of one engine step by phase: decode, mixed, or prefill.",
    _MOMENTS: "Sums over steps of n=1, p=prompt tokens, d=decode tokens, t=seconds, and of their products.",
    _CHUNKS: "Requests with prompt tokens in a step, summed over steps.",
    _ERRORS: "Exceptions swallowed in the plugin.",
    _INFO: "Settings of the scheduler that shape interference.",
}
SETTINGS: Final = {
    "max_num_batched_tokens": ("scheduler_config", "max_num_batched_tokens"),
    "max_num_seqs": ("scheduler_config", "max_num_seqs"),
    "long_prefill_token_threshold": ("scheduler_config", "long_prefill_token_threshold"),
    "chunked_prefill": ("scheduler_config", "enable_chunked_prefill"),
    "async_scheduling": ("scheduler_config", "async_scheduling"),
    "policy": ("scheduler_config", "policy"),
    "block_size": ("cache_config", "block_size"),
    "prefix_caching": ("cache_config", "enable_prefix_caching"),
    "iteration_details": ("observability_config", "enable_logging_iteration_details"),
}
"""Labels of the info gauge, and where vLLM's configuration holds them; what a version lacks is the empty string."""


class _Sums:
    """Everything counted for one engine since the process began."""

    __slots__ = ("chunks", "decode", "durations", "engine", "errors", "moments", "prefill", "settings")

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.settings: dict[str, str] = dict.fromkeys(SETTINGS, "")
        self.moments = {phase: [0.0] * len(TERMS) for phase in PHASES}
        self.prefill = [0] * (len(TOKEN_EDGES) + 1)
        self.decode = [0] * (len(TOKEN_EDGES) + 1)
        self.durations = {phase: [0] * (len(SECOND_EDGES) + 1) for phase in PHASES}
        self.chunks = 0
        self.errors = 0

    def total(self, term: str) -> float:
        place = TERMS.index(term)
        return sum(self.moments[phase][place] for phase in PHASES)


class StepCollector(Collector):
    """Gives the sums to a registry whenever a page is made."""

    def __init__(self, engines: dict[str, _Sums]) -> None:
        self._engines = engines

    def describe(self) -> Iterable["Metric"]:
        """The families by name, so that a filtered page can find them."""
        return self._families({})

    def collect(self) -> Iterable["Metric"]:
        """The families with their samples."""
        return self._families(self._engines)

    @staticmethod
    def _families(engines: dict[str, _Sums]) -> Iterator["Metric"]:
        prefill = HistogramMetricFamily(_PREFILL, HELP[_PREFILL], labels=["engine"])
        decode = HistogramMetricFamily(_DECODE, HELP[_DECODE], labels=["engine"])
        duration = HistogramMetricFamily(_DURATION, HELP[_DURATION], labels=["engine", "phase"])
        moments = CounterMetricFamily(_MOMENTS, HELP[_MOMENTS], labels=["engine", "phase", "term"])
        chunks = CounterMetricFamily(_CHUNKS, HELP[_CHUNKS], labels=["engine"])
        errors = CounterMetricFamily(_ERRORS, HELP[_ERRORS], labels=["engine"])
        info = GaugeMetricFamily(_INFO, HELP[_INFO], labels=["engine", *SETTINGS])
        for engine, sums in engines.items():
            prefill.add_metric([engine], _cumulative(TOKEN_EDGES, sums.prefill), sums.total("p"))
            decode.add_metric([engine], _cumulative(TOKEN_EDGES, sums.decode), sums.total("d"))
            for phase in PHASES:
                counts = _cumulative(SECOND_EDGES, sums.durations[phase])
                duration.add_metric([engine, phase], counts, sums.moments[phase][_T])
                for term, value in zip(TERMS, sums.moments[phase], strict=True):
                    moments.add_metric([engine, phase, term], value)
            chunks.add_metric([engine], sums.chunks)
            errors.add_metric([engine], sums.errors)
            info.add_metric([engine, *sums.settings.values()], 1.0)
        yield from (prefill, decode, duration, moments, chunks, errors, info)


def _cumulative(edges: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    running = 0
    rows: list[tuple[str, float]] = []
    for edge, count in zip((*edges, float("inf")), counts, strict=True):
        running += count
        rows.append(("+Inf" if edge == float("inf") else repr(edge), running))
    return rows


@dataclass(slots=True)
class _Children:
    """The series of one engine, and what they were given so far."""

    given: _Sums
    prefill: Histogram
    decode: Histogram
    duration: dict[str, Histogram]
    moments: dict[str, list[Counter]]
    chunks: Counter
    errors: Counter


class Handover:
    """Hands the sums to prometheus_client's own objects, whose files other processes read."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._prefill = Histogram(_PREFILL, HELP[_PREFILL], ["engine"], buckets=TOKEN_EDGES, registry=registry)
        self._decode = Histogram(_DECODE, HELP[_DECODE], ["engine"], buckets=TOKEN_EDGES, registry=registry)
        self._duration = Histogram(
            _DURATION, HELP[_DURATION], ["engine", "phase"], buckets=SECOND_EDGES, registry=registry
        )
        self._moments = Counter(_MOMENTS, HELP[_MOMENTS], ["engine", "phase", "term"], registry=registry)
        self._chunks = Counter(_CHUNKS, HELP[_CHUNKS], ["engine"], registry=registry)
        self._errors = Counter(_ERRORS, HELP[_ERRORS], ["engine"], registry=registry)
        self._info = Gauge(_INFO, HELP[_INFO], ["engine", *SETTINGS], registry=registry, multiprocess_mode="mostrecent")
        self._children: dict[str, _Children] = {}

    def describe_engine(self, sums: _Sums) -> None:
        """Shows the settings, and every series at 0, before the first step."""
        engine = sums.engine
        self._info.labels(engine, *sums.settings.values()).set(1.0)
        self._children[engine] = _Children(
            given=_Sums(engine),
            prefill=self._prefill.labels(engine),
            decode=self._decode.labels(engine),
            duration={phase: self._duration.labels(engine, phase) for phase in PHASES},
            moments={phase: [self._moments.labels(engine, phase, term) for term in TERMS] for phase in PHASES},
            chunks=self._chunks.labels(engine),
            errors=self._errors.labels(engine),
        )

    def give(self, sums: _Sums) -> None:
        """Adds what was counted since the last time."""
        to = self._children[sums.engine]
        given = to.given
        _observe(to.prefill, given.prefill, sums.prefill, sums.total("p") - given.total("p"))
        _observe(to.decode, given.decode, sums.decode, sums.total("d") - given.total("d"))
        for phase in PHASES:
            old, new = given.moments[phase], sums.moments[phase]
            if old[0] == new[0]:
                continue
            _observe(to.duration[phase], given.durations[phase], sums.durations[phase], new[_T] - old[_T])
            for place, child in enumerate(to.moments[phase]):
                if new[place] > old[place]:
                    child.inc(new[place] - old[place])
            given.moments[phase] = list(new)
        if sums.chunks > given.chunks:
            to.chunks.inc(sums.chunks - given.chunks)
            given.chunks = sums.chunks
        if sums.errors > given.errors:
            to.errors.inc(sums.errors - given.errors)
            given.errors = sums.errors


def _observe(child: Histogram, given: list[int], counts: list[int], total: float) -> None:
    # prometheus_client has no public way to add many observations at once; its own buckets are not cumulative.
    for place, count in enumerate(counts):
        if count != given[place]:
            child._buckets[place].inc(count - given[place])  # noqa: SLF001  # see above
            given[place] = count
    if total:
        child._sum.inc(total)  # noqa: SLF001  # see above


class Board:
    """What one process shows: registered once, however many engines it serves."""

    def __init__(self, registry: CollectorRegistry = REGISTRY, *, multiprocess: bool | None = None) -> None:
        self.engines: dict[str, _Sums] = {}
        self.handover: Handover | None = None
        if multiprocess is None:
            multiprocess = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        if multiprocess:
            self.handover = Handover(registry)
        else:
            registry.register(StepCollector(self.engines))

    def engine(self, index: int) -> _Sums:
        """The sums of one engine, made when first asked for."""
        return self.engines.setdefault(str(index), _Sums(str(index)))


_board: Board | None = None


def _process_board() -> Board:
    global _board  # noqa: PLW0603  # a registry takes a name once a process, and vLLM makes a logger for each engine
    if _board is None:
        _board = Board()
    return _board


class StepLogger(StatLoggerBase):
    """vLLM's stat logger: one instance an engine and API server process.

    Args:
        vllm_config: vLLM's whole configuration.
        engine_index: The data-parallel rank.
        board: Where to count; the process's own by default.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0, *, board: Board | None = None) -> None:
        self._sums = _Sums(str(engine_index))
        self._handover: Handover | None = None
        self._silent = False
        self._given_at = 0.0
        self._due = False
        try:
            board = board or _process_board()
            self._sums = board.engine(engine_index)
            self._sums.settings = _settings(vllm_config)
            self._handover = board.handover
            if self._handover is not None:
                self._handover.describe_engine(self._sums)
            if self._sums.settings["iteration_details"] != "true":
                self._warn("start vLLM with --enable-logging-iteration-details (0.26 or later)")
        except Exception:  # noqa: BLE001  # an exception here would stop vLLM from starting
            self._sums.errors += 1

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any = None,  # noqa: ARG002  # vLLM's interface
        mm_cache_stats: Any = None,  # noqa: ARG002
        engine_idx: int = 0,  # noqa: ARG002
        **_: Any,
    ) -> None:
        """Takes one message of the engine core into account: one step, or none."""
        try:
            if scheduler_stats is None:
                return
            details = scheduler_stats.iteration_details
            if details is None:
                return
            p = details.num_ctx_tokens
            d = details.num_generation_tokens
            if details.is_dummy or not (p or d):
                return
            t = details.elapsed_ms / 1000.0
            sums = self._sums
            phase = "decode" if not p else "mixed" if d else "prefill"
            m = sums.moments[phase]
            m[0] += 1.0
            m[3] += t
            m[6] += t * t
            if p:
                m[1] += p
                m[4] += p * p
                m[7] += p * d
                m[8] += p * t
                sums.chunks += details.num_ctx_requests
            if d:
                m[2] += d
                m[5] += d * d
                m[9] += d * t
            sums.prefill[bisect_left(TOKEN_EDGES, p)] += 1
            sums.decode[bisect_left(TOKEN_EDGES, d)] += 1
            sums.durations[phase][bisect_left(SECOND_EDGES, t)] += 1
            if self._handover is not None:
                if time.monotonic() - self._given_at >= _FLUSH_SECONDS or not scheduler_stats.num_running_reqs:
                    self._give()
                elif not self._due:
                    # The engine's next message may go to another API server: what is left must not wait for ours.
                    self._due = True
                    with contextlib.suppress(RuntimeError):  # no loop runs: then `log` and the next step remain
                        asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._give)
        except Exception as error:  # noqa: BLE001  # an exception here would end every request in flight
            self._failed(error)

    def log_engine_initialized(self) -> None:
        """Part of vLLM's interface; there is nothing to say."""

    def log(self) -> None:
        """Called now and then by vLLM: what is left over is handed to the other processes."""
        self._give()

    def _give(self) -> None:
        self._due = False
        self._given_at = time.monotonic()
        try:
            if self._handover is not None:
                self._handover.give(self._sums)
        except Exception as error:  # noqa: BLE001  # as above
            self._failed(error)

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
        """Part of vLLM's interface; vLLM exports it itself."""

    def _failed(self, error: Exception) -> None:
        self._sums.errors += 1
        if isinstance(error, AttributeError) and self._sums.total("n") == 0:
            self._warn("this vLLM does not give the details of a step (0.26 or later does)")

    def _warn(self, remedy: str) -> None:
        if not self._silent:
            self._silent = True
            log.warning("stallwatch counts no engine steps: %s", remedy)


def _settings(vllm_config: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for label, (part, name) in SETTINGS.items():
        value = getattr(getattr(vllm_config, part, None), name, None)
        found[label] = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return found
