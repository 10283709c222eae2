"""Runs inside vLLM: what every counter said after every engine step, without a poll's guess at which step it saw.

A stat logger for the tests only, loaded beside the plugin. vLLM calls its own Prometheus logger after those of plugins,
so what the registry holds when a message arrives is the page as it stood after the message before. One JSON line a
message: what the engine core told of the step, and the samples. It writes to `$STEP_RECORD`.
"""

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY

if TYPE_CHECKING:

    class StatLoggerBase:
        """vLLM's interface of a stat logger, as far as it is used here."""

else:
    from vllm.v1.metrics.loggers import StatLoggerBase

_UNTOLD = ("_created", "_info", "_seconds_bucket")
_COMMON = frozenset({"model_name", "engine"})


def samples() -> dict[str, float]:
    """Every sample of vLLM's own families, keyed as the simulator's recorder keys them."""
    found = {}
    # Not `REGISTRY.collect()`: that would ask the operating system about the process after every step.
    collectors = {id(c): c for name, c in REGISTRY._names_to_collectors.items() if name.startswith("vllm:")}
    for collector in collectors.values():
        for family in collector.collect():
            for sample in family.samples:
                if not sample.name.endswith(_UNTOLD):
                    rest = (value for name, value in sorted(sample.labels.items()) if name not in _COMMON)
                    found["|".join([sample.name, *rest])] = sample.value
    return found


class StepRecorder(StatLoggerBase):
    """Writes a line when the next message, or a call of `log`, shows that the last one has been counted."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:  # noqa: ARG002  # vLLM's interface
        self._output = open(os.environ["STEP_RECORD"], "w")  # noqa: PTH123, SIM115  # open for the server's life
        self._told: dict[str, Any] | None = None

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
            self._output.write(json.dumps({"step": self._told, "samples": samples()}) + "\n")
            self._output.flush()
            self._told = None

    def log_engine_initialized(self) -> None:
        """Part of vLLM's interface; there is nothing to say."""

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
        """Part of vLLM's interface."""
