"""vLLM 0.32's metric families and the moment at which each of them moves.

Gauges move only when a step ends; prompt tokens, time to first token and iteration tokens move in one lump at a
request's first output; preemptions when the preempted request speaks again; everything about a whole request when
it finishes; a client that goes away leaves no trace. These moments are why a long prefill is invisible, so they are
kept exactly.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stallwatch.simulator.catalogue import (
    HELP,
    ITERATION_EDGES,
    ITL_EDGES,
    LATENCY_EDGES,
    N_EDGES,
    PREEMPTION_EDGES,
    TTFT_EDGES,
    token_edges,
)
from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.exposition import Family, Kind, Labels, Page, labels
from stallwatch.simulator.request import FinishReason, Request
from stallwatch.simulator.step import Outcome, Output, Step


class Extra(Protocol):
    """Families that somebody adds to the page, fed with every step: how a plugin inside vLLM shows up here."""

    def families(self) -> Iterable[Family]:
        """What to put on the page."""
        ...

    def observe(self, step: Step) -> None:
        """Takes a step that has ended into account."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """What `--enable-mfu-metrics` needs: bytes written are alpha per scheduled token and beta per row of logits."""

    alpha: float = 26624.0
    beta: float = 640.0
    weight_bytes: float = 12e6
    flops_per_token: float = 12e6


class EngineMetrics:
    """All `vllm:` families for every rank; `book` is vLLM's `record`, called once for each step that ended."""

    def __init__(
        self,
        page: Page,
        config: EngineConfig,
        *,
        model: str,
        ranks: int = 1,
        created: float | None = 0.0,
        accounting: Accounting | None = None,
        kv_connector: bool = False,
        extras: Sequence[Extra] = (),
    ) -> None:
        self._config = config
        self._accounting = accounting
        self._extras = extras
        self._kv_connector = kv_connector
        self._base = [labels(engine=rank, model_name=model) for rank in range(ranks)]
        self._made: dict[str, Family] = {}
        self._page = page
        self._created = created
        self._model = model
        self._labelled: dict[tuple[int, str, str], Labels] = {}
        # A plugin registers its families before the server's own logger does.
        for extra in extras:
            for family in extra.families():
                page.add(family)
        self._declare()

    def __getitem__(self, name: str) -> Family:
        return self._made[name]

    def base(self, rank: int) -> Labels:
        """The labels that every series of a rank carries."""
        return self._base[rank]

    def book(self, outcome: Outcome) -> None:
        """Takes one step's end into account."""
        rank = outcome.step.rank
        self._book_scheduler(outcome, rank)
        if not outcome.step.empty:
            for extra in self._extras:
                extra.observe(outcome.step)
        if outcome.outputs:
            self._book_outputs(outcome, rank)

    def refuse(self) -> None:
        """Counts a request that was turned away because too many are unfinished."""
        key = labels(model_name=self._model, reason="max_num_queued_reqs")
        self._made["admission_rejections"].add(key, 1)

    def sleep(self, level: int | None) -> None:
        """Shows the engine asleep at a level, or awake with None."""
        states = {"awake": level is None, "weights_offloaded": level == 1, "discard_all": level == 2}
        for rank in range(len(self._base)):
            for state, on in states.items():
                self._made["engine_sleep_state"].set(self._with(rank, "sleep_state", state), float(on))

    def _with(self, rank: int, name: str, value: str) -> Labels:
        key = (rank, name, value)
        found = self._labelled.get(key)
        if found is None:
            found = self._labelled[key] = tuple(sorted((*self._base[rank], (name, value))))
        return found

    def _book_scheduler(self, outcome: Outcome, rank: int) -> None:
        made, base, stats = self._made, self._base[rank], outcome.stats
        made["num_requests_running"].set(base, stats.running)
        made["num_requests_waiting"].set(base, stats.waiting + stats.deferred)
        by_reason = made["num_requests_waiting_by_reason"]
        by_reason.set(self._with(rank, "reason", "capacity"), stats.waiting)
        by_reason.set(self._with(rank, "reason", "deferred"), stats.deferred)
        if self._kv_connector:
            stages = made["num_requests_kv_fetch_by_stage"]
            stages.set(self._with(rank, "stage", "in_progress"), stats.loading)
            stages.set(self._with(rank, "stage", "completed_waiting"), stats.loaded_waiting)
        made["kv_cache_usage_perc"].set(base, stats.kv_usage)
        if stats.queries:
            made["prefix_cache_queries"].add(base, stats.queries)
            made["prefix_cache_hits"].add(base, stats.hits)
            made["prompt_tokens_cached_by_source"].add(self._with(rank, "source", "device"), stats.hits)
        if stats.external_queries:
            made["external_prefix_cache_queries"].add(base, stats.external_queries)
            made["external_prefix_cache_hits"].add(base, stats.external_hits)
            made["prompt_tokens_cached_by_source"].add(self._with(rank, "source", "host"), stats.external_hits)
        step, accounting = outcome.step, self._accounting
        if accounting is not None and not step.empty:
            tokens = step.prefill_tokens + step.decode_tokens
            rows = step.prefill_requests + step.decode_tokens
            made["estimated_flops_per_gpu"].add(base, accounting.flops_per_token * tokens)
            made["estimated_read_bytes_per_gpu"].add(base, accounting.weight_bytes + accounting.alpha * tokens)
            made["estimated_write_bytes_per_gpu"].add(base, accounting.alpha * tokens + accounting.beta * rows)
        if self._config.num_speculative_tokens:
            self._book_drafts(outcome.outputs, rank)

    def _book_drafts(self, outputs: tuple[Output, ...], rank: int) -> None:
        made, base = self._made, self._base[rank]
        for output in outputs:
            if output.drafts:
                accepted = output.count - 1
                made["spec_decode_num_drafts"].add(base, 1)
                made["spec_decode_num_draft_tokens"].add(base, output.drafts)
                made["spec_decode_num_accepted_tokens"].add(base, accepted)
                for position in range(accepted):
                    family = made["spec_decode_num_accepted_tokens_per_pos"]
                    family.add(self._with(rank, "position", str(position)), 1)

    def _book_outputs(self, outcome: Outcome, rank: int) -> None:
        made, base, end = self._made, self._base[rank], outcome.step.end
        generated = computed = preemptions = 0
        latencies: Counter[float] = Counter()
        for output in outcome.outputs:
            request = output.request
            generated += output.count
            if output.first == 0:
                local = request.cached_tokens - request.external_hits
                fresh = request.prompt_tokens - request.cached_tokens
                computed += fresh
                made["prompt_tokens"].add(base, request.prompt_tokens)
                by_source = made["prompt_tokens_by_source"]
                by_source.add(self._with(rank, "source", "local_compute"), fresh)
                by_source.add(self._with(rank, "source", "local_cache_hit"), local)
                by_source.add(self._with(rank, "source", "external_kv_transfer"), request.external_hits)
                made["prompt_tokens_cached"].add(base, request.cached_tokens)
                made["time_to_first_token_seconds"].observe(base, end - request.arrival)
            else:
                latencies[end - request.last_token_at] += 1
            request.last_token_at = end
            preemptions += request.preemptions - request.preemptions_booked
            request.preemptions_booked = request.preemptions
        made["generation_tokens"].add(base, generated)
        made["num_preemptions"].add(base, preemptions)
        made["iteration_tokens_total"].observe(base, computed + generated)
        for latency, times in latencies.items():
            made["inter_token_latency_seconds"].observe(base, latency, times)
        for output in outcome.outputs:
            if output.finish_reason is not None:
                self._book_finished(output.request, output.finish_reason, end)

    def _book_finished(self, request: Request, reason: FinishReason, end: float) -> None:
        made, base = self._made, self._base[request.rank]
        first = request.first_token_at if request.first_token_at is not None else end
        scheduled = request.scheduled_at if request.scheduled_at is not None else first
        generated = len(request.output)
        made["request_success"].add(self._with(request.rank, "finished_reason", reason), 1)
        for name, value in {
            "e2e_request_latency_seconds": end - request.arrival,
            "request_queue_time_seconds": scheduled - request.queued_at,
            "request_prefill_time_seconds": first - scheduled,
            "request_inference_time_seconds": end - scheduled,
            "request_decode_time_seconds": end - first,
            "request_num_preemptions": request.preemptions,
            "request_prefill_kv_computed_tokens": request.prompt_tokens - request.cached_tokens,
            "request_prompt_tokens": request.prompt_tokens,
            "request_generation_tokens": generated,
            "request_time_per_output_token_seconds": (end - first) / (generated - 1) if generated > 1 else 0.0,
            "request_params_max_tokens": request.max_tokens,
            "request_max_num_generation_tokens": generated,
            "request_params_n": 1,
        }.items():
            made[name].observe(base, value)

    def _declare(self) -> None:
        spec = self._config.num_speculative_tokens
        plain = self._plain
        if spec:
            plain("spec_decode_num_drafts", Kind.COUNTER)
            plain("spec_decode_num_draft_tokens", Kind.COUNTER)
            plain("spec_decode_num_accepted_tokens", Kind.COUNTER)
            positions = tuple(str(position) for position in range(spec))
            self._split("spec_decode_num_accepted_tokens_per_pos", Kind.COUNTER, "position", positions)
        plain("estimated_flops_per_gpu", Kind.COUNTER)
        plain("estimated_read_bytes_per_gpu", Kind.COUNTER)
        plain("estimated_write_bytes_per_gpu", Kind.COUNTER)
        plain("num_requests_running", Kind.GAUGE)
        plain("num_requests_waiting", Kind.GAUGE)
        self._split("num_requests_waiting_by_reason", Kind.GAUGE, "reason", ("capacity", "deferred"))
        if self._kv_connector:
            stages = ("waiting_to_start", "in_progress", "completed_waiting")
            self._split("num_requests_kv_fetch_by_stage", Kind.GAUGE, "stage", stages)
        states = ("awake", "weights_offloaded", "discard_all")
        self._split("engine_sleep_state", Kind.GAUGE, "sleep_state", states)
        self.sleep(None)
        plain("kv_cache_usage_perc", Kind.GAUGE)
        plain("prefix_cache_queries", Kind.COUNTER)
        plain("prefix_cache_hits", Kind.COUNTER)
        plain("external_prefix_cache_queries", Kind.COUNTER)
        plain("external_prefix_cache_hits", Kind.COUNTER)
        plain("mm_cache_queries", Kind.COUNTER)
        plain("mm_cache_hits", Kind.COUNTER)
        plain("num_preemptions", Kind.COUNTER)
        plain("prompt_tokens", Kind.COUNTER)
        sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
        self._split("prompt_tokens_by_source", Kind.COUNTER, "source", sources)
        plain("prompt_tokens_cached", Kind.COUNTER)
        tiers = ("device", "host", "p2p", "disk", "external_unspecified")
        self._split("prompt_tokens_cached_by_source", Kind.COUNTER, "source", tiers)
        plain("generation_tokens", Kind.COUNTER)
        self._split("request_success", Kind.COUNTER, "finished_reason", tuple(FinishReason))
        rejections = self._family("admission_rejections", Kind.COUNTER)
        for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
            rejections.child(labels(model_name=self._model, reason=reason))
        self._declare_histograms()

    def _declare_histograms(self) -> None:
        tokens = token_edges(self._config.max_model_len)
        for name, edges in (
            ("request_prompt_tokens", tokens),
            ("request_generation_tokens", tokens),
            ("iteration_tokens_total", ITERATION_EDGES),
            ("request_max_num_generation_tokens", tokens),
            ("request_params_n", N_EDGES),
            ("request_params_max_tokens", tokens),
            ("time_to_first_token_seconds", TTFT_EDGES),
            ("inter_token_latency_seconds", ITL_EDGES),
            ("request_time_per_output_token_seconds", ITL_EDGES),
            ("e2e_request_latency_seconds", LATENCY_EDGES),
            ("request_queue_time_seconds", LATENCY_EDGES),
            ("request_inference_time_seconds", LATENCY_EDGES),
            ("request_prefill_time_seconds", LATENCY_EDGES),
            ("request_decode_time_seconds", LATENCY_EDGES),
            ("request_num_preemptions", PREEMPTION_EDGES),
            ("request_prefill_kv_computed_tokens", tokens),
        ):
            self._plain(name, Kind.HISTOGRAM, edges)

    def _family(self, name: str, kind: Kind, edges: tuple[float, ...] = ()) -> Family:
        created = None if kind is Kind.GAUGE else self._created
        family = Family(f"vllm:{name}", kind, help=HELP[name], edges=edges, created=created)
        self._made[name] = self._page.add(family)
        return family

    def _plain(self, name: str, kind: Kind, edges: tuple[float, ...] = ()) -> None:
        family = self._family(name, kind, edges)
        for base in self._base:
            family.child(base)

    def _split(self, name: str, kind: Kind, label: str, values: tuple[str, ...]) -> None:
        family = self._family(name, kind)
        for rank in range(len(self._base)):
            for value in values:
                family.child(self._with(rank, label, value))
