"""The families that a stat-logger plugin inside vLLM adds to the page, computed from the steps themselves.

They stand in for the real plugin where there is no vLLM, under its names; they never appear unless asked for.
"""

from collections.abc import Iterable

from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.exposition import Family, Kind, labels
from stallwatch.simulator.step import Step

_TOKEN_EDGES = (0.0, *(float(2**power) for power in range(16)))
_SECOND_EDGES = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
    600.0,
)
_PHASES = ("decode", "mixed", "prefill")
_TERMS = ("n", "p", "d", "t", "pp", "dd", "tt", "pd", "pt", "dt")


class StepFamilies:
    """Histograms of tokens and duration by step, and the sums that a fit of duration against tokens needs."""

    def __init__(self, config: EngineConfig, *, ranks: int) -> None:
        self._prefill = Family(
            "stallwatch_plugin_step_prefill_tokens",
            Kind.HISTOGRAM,
            help="Prompt tokens that one engine step computed.",
            edges=_TOKEN_EDGES,
        )
        self._decode = Family(
            "stallwatch_plugin_step_decode_tokens",
            Kind.HISTOGRAM,
            help="Decode tokens that one engine step computed.",
            edges=_TOKEN_EDGES,
        )
        self._duration = Family(
            "stallwatch_plugin_step_duration_seconds",
            Kind.HISTOGRAM,
            help="Duration of one engine step by phase: decode, mixed, or prefill.",
            edges=_SECOND_EDGES,
        )
        self._moments = Family(
            "stallwatch_plugin_step_moments",
            Kind.COUNTER,
            help="Sums over steps of n=1, p=prompt tokens, d=decode tokens, t=seconds, and of their products.",
        )
        self._chunks = Family(
            "stallwatch_plugin_prefill_chunks",
            Kind.COUNTER,
            help="Requests with prompt tokens in a step, summed over steps.",
        )
        self._errors = Family("stallwatch_plugin_errors", Kind.COUNTER, help="Exceptions swallowed in the plugin.")
        self._scheduler = Family(
            "stallwatch_plugin_scheduler_info",
            Kind.GAUGE,
            help="Settings of the scheduler that shape interference.",
        )
        for rank in range(ranks):
            base = labels(engine=rank)
            for family in (self._prefill, self._decode, self._chunks, self._errors):
                family.child(base)
            for phase in _PHASES:
                self._duration.child(labels(engine=rank, phase=phase))
                for term in _TERMS:
                    self._moments.child(labels(engine=rank, phase=phase, term=term))
            self._scheduler.set(
                labels(
                    engine=rank,
                    async_scheduling=_flag(config.async_scheduling),
                    block_size=config.block_size,
                    chunked_prefill=_flag(config.enable_chunked_prefill),
                    iteration_details="true",
                    long_prefill_token_threshold=config.long_prefill_token_threshold,
                    max_num_batched_tokens=config.max_num_batched_tokens,
                    max_num_seqs=config.max_num_seqs,
                    policy=config.policy,
                    prefix_caching=_flag(config.enable_prefix_caching),
                ),
                1.0,
            )

    def families(self) -> Iterable[Family]:
        """What to put on the page."""
        return (
            *(self._prefill, self._decode, self._duration, self._moments),
            *(self._chunks, self._errors, self._scheduler),
        )

    def observe(self, step: Step) -> None:
        """Takes a step that has ended into account."""
        base = labels(engine=step.rank)
        prefill = step.told_prefill_tokens
        decode = step.prefill_tokens + step.decode_tokens - prefill
        phase = "decode" if not prefill else "mixed" if decode else "prefill"
        values = {"n": 1.0, "p": float(prefill), "d": float(decode), "t": step.seconds}
        self._prefill.observe(base, values["p"])
        self._decode.observe(base, values["d"])
        self._duration.observe(labels(engine=step.rank, phase=phase), step.seconds)
        self._chunks.add(base, step.told_prefill_requests)
        for term in _TERMS:
            product = values[term[0]] * (values[term[1]] if len(term) == 2 else 1.0)
            self._moments.add(labels(engine=step.rank, phase=phase, term=term), product)


def _flag(on: bool) -> str:  # noqa: FBT001  # a value to spell
    return "true" if on else "false"
