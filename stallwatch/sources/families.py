"""Which of vLLM's metrics fills which field of `EngineCounters`, from vLLM 0.6.6 to 0.33. Data, not code.

A row is one quantity. Its aliases are the names that it has had, newest first: the first that a page offers is read,
and two are never added, although 0.9.2 to 0.10.2 offer old and new side by side. Rows with the same field are different
quantities that add up. Names are those of samples, as a filtered request must spell them: vLLM's server finds a family
by any of its samples' names, but returns only samples that were named.

Several values of `model_name` on one engine (vLLM gives one; proxies that merge pages give more) are folded: all is
added, except a ratio, of which the largest counts. LoRA adapters are no label values here: vLLM does not split by them.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stallwatch.observations import Lane


class Fold(StrEnum):
    """What becomes of several series that mean the same field of the same engine."""

    ADD = "add"
    LARGEST = "largest"


class Unit(StrEnum):
    """Units that differ from the field's own."""

    SAME = "same"
    BY_HELP = "by_help"  # tokens or blocks: only the family's help text says which; blocks are multiplied by their size


@dataclass(frozen=True, slots=True)
class Alias:
    """One name of a quantity; `since` and `until` (inclusive) are the first and last release with it by default."""

    name: str
    since: str = "0.6.6"
    until: str | None = None
    where: tuple[str, str] | None = None  # a label and the value that it must have
    unit: Unit = Unit.SAME


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity. An optional one needs a flag, a connector or a plugin, and is not called missing."""

    field: str
    lane: Lane  # the smallest request that asks for it
    aliases: tuple[Alias, ...]
    fold: Fold = Fold.ADD
    buckets: bool = False
    optional: bool = False


def _row(
    target: str,
    lane: Lane,
    *aliases: Alias | str,
    fold: Fold = Fold.ADD,
    buckets: bool = False,
    optional: bool = False,
) -> Row:
    spelled = tuple(alias if isinstance(alias, Alias) else Alias(alias) for alias in aliases)
    return Row(target, lane, spelled, fold=fold, buckets=buckets, optional=optional)


_D, _E, _F = Lane.DETECTION, Lane.ESTIMATOR, Lane.FULL

_ITL = "vllm:inter_token_latency_seconds"
_TPOT = "vllm:time_per_output_token_seconds"  # the same quantity under its old name
_TTFT = "vllm:time_to_first_token_seconds"
_BY_REASON = "vllm:num_requests_waiting_by_reason"
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"


def _itl(suffix: str) -> tuple[Alias, Alias]:
    return Alias(_ITL + suffix, since="0.10.2"), Alias(_TPOT + suffix, until="0.11.2")


def _prefix(what: str) -> tuple[Alias, Alias]:
    return (
        Alias(f"vllm:prefix_cache_{what}_total", since="0.9.2"),
        Alias(f"vllm:gpu_prefix_cache_{what}_total", since="0.8.5", until="0.10.2", unit=Unit.BY_HELP),
    )


# The server's cost is collecting a whole family, once, however many of its samples are named; so counts, sums and
# buckets of one family stand in the same lane unless the lines themselves are too many.
ROWS: Final = (
    _row("running", _D, "vllm:num_requests_running"),
    _row("waiting", _D, "vllm:num_requests_waiting"),
    _row(
        "kv_usage",
        _D,
        Alias("vllm:kv_cache_usage_perc", since="0.9.2"),
        Alias("vllm:gpu_cache_usage_perc", until="0.10.2"),
        fold=Fold.LARGEST,
    ),
    _row("prefix_queries", _D, *_prefix("queries")),
    _row("iterations", _D, "vllm:iteration_tokens_total_count"),
    _row("generation_tokens", _D, "vllm:generation_tokens_total"),
    _row("itl_count", _D, *_itl("_count")),
    _row("waiting_capacity", _E, Alias(_BY_REASON, since="0.20.0", where=("reason", "capacity"))),
    _row("waiting_deferred", _E, Alias(_BY_REASON, since="0.20.0", where=("reason", "deferred"))),
    _row("kv_fetch_waiting", _E, Alias("vllm:num_requests_kv_fetch_by_stage", since="0.32.0"), optional=True),
    _row("prefix_hits", _E, *_prefix("hits")),
    _row("external_queries", _E, Alias("vllm:external_prefix_cache_queries_total", since="0.11.1")),
    _row("external_hits", _E, Alias("vllm:external_prefix_cache_hits_total", since="0.11.1")),
    _row("iteration_tokens", _E, "vllm:iteration_tokens_total_sum"),
    _row("itl_sum", _D, *_itl("_sum")),  # of a family that is collected for its count anyway
    _row("itl_buckets", _E, *_itl("_bucket"), buckets=True),
    _row("preemptions", _E, "vllm:num_preemptions_total"),
    _row("first_tokens", _E, _TTFT + "_count"),
    _row("ttft_sum", _E, _TTFT + "_sum"),
    _row("ttft_buckets", _F, _TTFT + "_bucket", buckets=True),
    _row("prompt_tokens", _E, "vllm:prompt_tokens_total"),
    _row("prompt_local_compute", _E, Alias(_BY_SOURCE, since="0.16.0", where=("source", "local_compute"))),
    _row("prompt_local_cache_hit", _E, Alias(_BY_SOURCE, since="0.16.0", where=("source", "local_cache_hit"))),
    _row("prompt_external", _E, Alias(_BY_SOURCE, since="0.16.0", where=("source", "external_kv_transfer"))),
    _row("finished", _F, "vllm:request_success_total"),
    _row("finished_count", _E, "vllm:request_prompt_tokens_count"),
    _row("finished_prompt_tokens", _E, "vllm:request_prompt_tokens_sum"),
    _row("finished_generation_tokens", _E, "vllm:request_generation_tokens_sum"),
    _row("finished_prefill_computed_tokens", _E, Alias("vllm:request_prefill_kv_computed_tokens_sum", since="0.13.0")),
    _row("queue_seconds", _F, "vllm:request_queue_time_seconds_sum"),
    _row("write_bytes", _E, Alias("vllm:estimated_write_bytes_per_gpu_total", since="0.17.0"), optional=True),
    _row("spec_draft_tokens", _E, "vllm:spec_decode_num_draft_tokens_total", optional=True),
    _row("spec_accepted_tokens", _E, "vllm:spec_decode_num_accepted_tokens_total", optional=True),
    _row(
        "kv_load_seconds",
        _E,
        "vllm:kv_offload_load_time_total",
        Alias("vllm:kv_offload_total_time_total", where=("transfer_type", "CPU_to_GPU")),
        optional=True,
    ),
    _row("kv_load_seconds", _E, "vllm:nixl_xfer_time_seconds_sum", optional=True),
)

# What is not a counter of an engine.
PROCESS_START: Final = "process_start_time_seconds"
SLEEP_STATE: Final = "vllm:engine_sleep_state"
AWAKE: Final = "awake"  # its label `sleep_state` while the model is loaded
CACHE_INFO: Final = "vllm:cache_config_info"
PLUGIN_PREFIX: Final = "stallwatch_plugin_"

_LANES = (Lane.DETECTION, Lane.ESTIMATOR, Lane.FULL)


def rows_of(lane: Lane) -> tuple[Row, ...]:
    """The rows that a request of this lane fills: its own and those of every smaller lane."""
    return tuple(row for row in ROWS if _LANES.index(row.lane) <= _LANES.index(lane))
