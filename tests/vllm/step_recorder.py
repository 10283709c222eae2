"""Runs inside vLLM: what every counter said after every engine step, without a poll's guess at which step it saw.

A stat logger for the tests only, loaded beside the plugin. vLLM calls its own Prometheus logger after those of plugins,
so what the registry holds when a message arrives is the page as it stood after the message before. One JSON line a
message: what the engine core told of the step, and the samples. It writes to `$STEP_RECORD`.
"""

import json
import os
from dataclasses import asdict
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY

if TYPE_CHECKING:

    class StatLoggerBase:
        """vLLM's interface of a stat logger, as far as it is used here."""

else:
    from vllm.v1.metrics.loggers import StatLoggerBase

_COMMON = frozenset({"model_name", "engine"})


class _Samples:
    """Every sample of vLLM's own families but buckets of seconds, keyed as the simulator's recorder keys them.

    Straight from the objects' values: to collect the families takes milliseconds, after every step as long as the step
    itself, and the readers of this server's streams would feel it.
    """

    def __init__(self) -> None:
        self._children = 0
        self._values: list[tuple[str, Any]] = []
        self._distributions: list[tuple[str, list[str], list[Any]]] = []  # key of the count, keys of the edges, buckets

    def now(self) -> dict[str, float]:
        """All values as they stand."""
        metrics = _metrics()
        children = sum(len(metric._metrics) for metric in metrics)
        if children != self._children:
            self._children = children
            self._values, self._distributions = [], []
            for metric in metrics:
                for values, child in metric._metrics.items():
                    self._add(metric, dict(zip(metric._labelnames, values, strict=True)), child)
        found = {key: value.get() for key, value in self._values}
        for count, edges, buckets in self._distributions:
            reached = list(accumulate(bucket.get() for bucket in buckets))
            found[count] = reached[-1]
            found.update(zip(edges, reached, strict=False))
        return found

    def _add(self, metric: Any, labels: dict[str, str], child: Any) -> None:
        rest = [value for name, value in sorted(labels.items()) if name not in _COMMON]
        if metric._type != "histogram":
            name = metric._name + ("_total" if metric._type == "counter" else "")
            self._values.append(("|".join([name, *rest]), child._value))
            return
        self._values.append(("|".join([f"{metric._name}_sum", *rest]), child._sum))
        edges = []
        if not metric._name.endswith("_seconds"):
            upper = ["+Inf" if edge == float("inf") else str(edge) for edge in child._upper_bounds]
            edges = [f"{metric._name}_bucket|{edge}" for edge in upper]
        self._distributions.append((f"{metric._name}_count", edges, child._buckets))


def _metrics() -> list[Any]:
    """The families of vLLM itself, each once although it is registered under several names."""
    named: list[tuple[str, Any]] = list(REGISTRY._names_to_collectors.items())
    found = [m for name, m in named if name.startswith("vllm:") and not name.endswith("_info")]
    return list({id(metric): metric for metric in found if hasattr(metric, "_metrics")}.values())


class StepRecorder(StatLoggerBase):
    """Writes a line when the next message, or a call of `log`, shows that the last one has been counted."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:  # noqa: ARG002  # vLLM's interface
        self._output = open(os.environ["STEP_RECORD"], "w")  # noqa: PTH123, SIM115  # open for the server's life
        self._told: dict[str, Any] | None = None
        self._samples = _Samples()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any = None,  # noqa: ARG002  # vLLM's interface
        mm_cache_stats: Any = None,  # noqa: ARG002
        engine_idx: int = 0,  # noqa: ARG002
        **_: Any,
    ) -> None:
        """Takes one message of the engine core."""
        self.log()
        details = scheduler_stats.iteration_details if scheduler_stats is not None else None
        self._told = asdict(details) if details is not None else None

    def log(self) -> None:
        """Called by vLLM now and then, and by the next message: the last one has been counted by now."""
        if self._told is not None:
            self._output.write(json.dumps({"step": self._told, "samples": self._samples.now()}) + "\n")
            self._output.flush()
            self._told = None

    def log_engine_initialized(self) -> None:
        """Part of vLLM's interface; there is nothing to say."""

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
        """Part of vLLM's interface."""
