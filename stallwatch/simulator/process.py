"""The families beside the engine's: the HTTP layer, the Python process, and the layout of the KV cache."""

from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.exposition import Family, Kind, Page, labels

_HTTP_FINE_EDGES = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0),
    60.0,
)
_HTTP_COARSE_EDGES = (0.1, 0.5, 1.0)

# The cache settings that no scenario changes.
_CACHE_DEFAULTS = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "cache_hit_alignment_tokens": "None",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "gpu_memory_utilization": "0.92",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_cache_memory_bytes": "1073741824",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "float32",
    "num_cpu_blocks": "None",
    "num_gpu_blocks_override": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "False",
}
_WAYS = ("incoming requests", "outgoing responses")
_HEADER_ONLY = "Only value of header is respected. Otherwise ignored. No percentile calculated. "


class HttpMetrics:
    """What the HTTP layer of vLLM counts: requests when they are complete, streams with their whole length."""

    def __init__(self, page: Page, *, created: float | None) -> None:
        def add(name: str, kind: Kind, *, help: str, edges: tuple[float, ...] = ()) -> Family:  # noqa: A002
            return page.add(Family(name, kind, help=help, edges=edges, created=created))

        self._total = add("http_requests", Kind.COUNTER, help="Total number of requests by method, status and handler.")
        incoming, outgoing = (f"Content length of {way} by handler. {_HEADER_ONLY}" for way in _WAYS)
        self._in = add("http_request_size_bytes", Kind.SUMMARY, help=incoming)
        self._out = add("http_response_size_bytes", Kind.SUMMARY, help=outgoing)
        self._fine = add(
            "http_request_duration_highr_seconds",
            Kind.HISTOGRAM,
            help="Latency with many buckets but no API specific labels. "
            "Made for more accurate percentile calculations. ",
            edges=_HTTP_FINE_EDGES,
        )
        self._fine.child(())
        self._coarse = add(
            "http_request_duration_seconds",
            Kind.HISTOGRAM,
            help="Latency with only few buckets by handler. "
            "Made to be only used if aggregation by handler is important. ",
            edges=_HTTP_COARSE_EDGES,
        )

    def count(self, handler: str, *, method: str, status: int, seconds: float, size_in: int, size_out: int) -> None:
        """Counts one finished request."""
        by_handler = labels(handler=handler)
        self._total.add(labels(handler=handler, method=method, status=f"{status // 100}xx"), 1)
        self._in.observe(by_handler, size_in)
        self._out.observe(by_handler, size_out)
        self._fine.observe((), seconds)
        self._coarse.observe(labels(handler=handler, method=method), seconds)


def process_families(*, started: float) -> list[Family]:
    """What the Python client says about its own process."""
    families = []
    for name, text, values in (
        ("python_gc_objects_collected", "Objects collected during gc", (12682.0, 1530.0, 1396.0)),
        ("python_gc_objects_uncollectable", "Uncollectable objects found during GC", (0.0, 0.0, 0.0)),
        ("python_gc_collections", "Number of times this generation was collected", (1505.0, 137.0, 10.0)),
    ):
        collected = Family(name, Kind.COUNTER, help=text)
        for generation, value in enumerate(values):
            collected.set(labels(generation=generation), value)
        families.append(collected)
    info = Family("python_info", Kind.GAUGE, help="Python platform information")
    version = {"implementation": "CPython", "major": "3", "minor": "12", "patchlevel": "3", "version": "3.12.3"}
    info.set(labels(**version), 1.0)
    families.append(info)
    for name, kind, value, text in (
        ("process_virtual_memory_bytes", Kind.GAUGE, 1.0347e10, "Virtual memory size in bytes."),
        ("process_resident_memory_bytes", Kind.GAUGE, 9.6e8, "Resident memory size in bytes."),
        ("process_start_time_seconds", Kind.GAUGE, started, "Start time of the process since unix epoch in seconds."),
        ("process_cpu_seconds", Kind.COUNTER, 20.0, "Total user and system CPU time spent in seconds."),
        ("process_open_fds", Kind.GAUGE, 58.0, "Number of open file descriptors."),
        ("process_max_fds", Kind.GAUGE, 1048576.0, "Maximum number of open file descriptors."),
    ):
        family = Family(name, kind, help=text)
        family.set((), value)
        families.append(family)
    return families


def cache_config_family(config: EngineConfig, *, ranks: int) -> Family:
    """The one place where a server tells block size and number of blocks."""
    family = Family("vllm:cache_config_info", Kind.GAUGE, help="Information of the LLMEngine CacheConfig")
    capacity = config.num_gpu_blocks * config.block_size
    for rank in range(ranks):
        known: dict[str, str | int] = {
            "block_size": config.block_size,
            "effective_attention_block_size": config.block_size,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "engine": rank,
            "kv_cache_max_concurrency": str(capacity / config.max_model_len),
            "kv_cache_size_tokens": capacity,
            "num_gpu_blocks": config.num_gpu_blocks,
        }
        family.set(labels(**known, **_CACHE_DEFAULTS), 1.0)
    return family
