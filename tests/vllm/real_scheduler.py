"""Runs in the environment of vLLM: its own scheduler, driven as its engine core drives it, with a made-up model.

`python real_scheduler.py MODEL < cases.json` prints a JSON list of rows a case. A case has the scheduler's settings and
events, each of which happens while a certain step is computed; a row is one step that computed something. There is no
clock and no server, so that all modes can be looked at, also those that vLLM does not offer on a CPU.
"""

import json
import sys
from collections import deque
from importlib import import_module
from typing import Any


def _vllm(path: str) -> Any:
    """Something of vLLM's by its path inside the package; the tools that check this file do not have vLLM."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"vllm.{module}"), name)


CacheConfig = _vllm("config.CacheConfig")
ModelConfig = _vllm("config.ModelConfig")
SchedulerConfig = _vllm("config.SchedulerConfig")
VllmConfig = _vllm("config.VllmConfig")
SamplingParams = _vllm("sampling_params.SamplingParams")
sha256 = _vllm("utils.hashing.sha256")
get_request_block_hasher = _vllm("v1.core.kv_cache_utils.get_request_block_hasher")
init_none_hash = _vllm("v1.core.kv_cache_utils.init_none_hash")
AsyncScheduler = _vllm("v1.core.sched.async_scheduler.AsyncScheduler")
Scheduler = _vllm("v1.core.sched.scheduler.Scheduler")
FullAttentionSpec = _vllm("v1.kv_cache_interface.FullAttentionSpec")
KVCacheConfig = _vllm("v1.kv_cache_interface.KVCacheConfig")
KVCacheGroupSpec = _vllm("v1.kv_cache_interface.KVCacheGroupSpec")
ModelRunnerOutput = _vllm("v1.outputs.ModelRunnerOutput")
Request = _vllm("v1.request.Request")
RequestStatus = _vllm("v1.request.RequestStatus")
StructuredOutputManager = _vllm("v1.structured_output.StructuredOutputManager")
compute_iteration_details = _vllm("v1.utils.compute_iteration_details")


def scheduler_of(case: dict[str, Any], model: str) -> Any:
    """The scheduler with these settings; those that the CPU's platform would change are set afterwards."""
    scheduling = SchedulerConfig(
        max_num_seqs=case["max_num_seqs"],
        max_num_batched_tokens=case["max_num_batched_tokens"],
        max_model_len=case["max_model_len"],
        long_prefill_token_threshold=case["long_prefill_token_threshold"],
        enable_chunked_prefill=case["enable_chunked_prefill"],
        scheduler_reserve_full_isl=case["scheduler_reserve_full_isl"],
        async_scheduling=False,
        policy=case["policy"],
        is_encoder_decoder=False,
    )
    cache = CacheConfig(block_size=128, enable_prefix_caching=case["enable_prefix_caching"])
    config = VllmConfig(
        scheduler_config=scheduling,
        cache_config=cache,
        model_config=ModelConfig(model=model, max_model_len=case["max_model_len"]),
    )
    cache.block_size = case["block_size"]
    cache.num_gpu_blocks = case["num_gpu_blocks"]
    scheduling.async_scheduling = case["async_scheduling"]
    scheduling.enable_chunked_prefill = case["enable_chunked_prefill"]
    spec = FullAttentionSpec(
        block_size=case["block_size"], num_kv_heads=1, head_size=1, dtype=import_module("torch").float32
    )
    made = (AsyncScheduler if case["async_scheduling"] else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=case["num_gpu_blocks"], kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=case["block_size"],
        hash_block_size=case["block_size"],
        log_stats=True,
    )
    made.use_v2_model_runner = case["model_runner_v2"]
    return made


class Core:
    """The part of vLLM's engine core that decides what happens in which order, with steps instead of time."""

    def __init__(self, case: dict[str, Any], model: str) -> None:
        self._scheduler = scheduler_of(case, model)
        self._depth = 2 if case["async_scheduling"] else 1
        hashing = get_request_block_hasher(case["block_size"], sha256) if case["enable_prefix_caching"] else None
        self._hashing = hashing
        self._events = deque(case["events"])
        self._inputs: deque[dict[str, Any]] = deque()
        self._batches: deque[tuple[Any, dict[str, list[int]]]] = deque()
        self._rows: list[dict[str, Any]] = []
        self._counted = {"queries": 0, "hits": 0}

    def run(self) -> list[dict[str, Any]]:
        """Until there is nothing left to do."""
        while self._events or self._inputs or self._scheduler.has_requests() or self._batches:
            if not self._scheduler.has_requests() and not self._batches and not self._inputs:
                self._inputs.append(self._events.popleft())
            self._read()
            self._turn()
        return self._rows

    def _read(self) -> None:
        while self._inputs:
            event = self._inputs.popleft()
            if "leave" in event:
                self._leave(event["leave"])
                continue
            self._scheduler.add_request(
                Request(
                    request_id=event["name"],
                    prompt_token_ids=event["prompt"],
                    sampling_params=SamplingParams(max_tokens=event["tokens"], ignore_eos=True),
                    pooling_params=None,
                    arrival_time=float(event["order"]),
                    priority=event["priority"],
                    block_hasher=self._hashing,
                )
            )

    def _leave(self, name: str) -> None:
        # One at a time: of several at once vLLM makes a set, and frees their blocks in an order of chance.
        self._scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def _turn(self) -> None:
        scheduler = self._scheduler
        if scheduler.has_requests():
            plan = scheduler.schedule()
            sampled = {
                name: [] if scheduler.requests[name].is_prefill_chunk else [7] for name in plan.num_scheduled_tokens
            }
            self._batches.appendleft((plan, sampled))
            if len(self._batches) < self._depth and (plan.total_num_scheduled_tokens or scheduler.has_requests()):
                return
        if self._batches:
            self._end(*self._batches.pop())

    def _end(self, plan: Any, sampled: dict[str, list[int]]) -> None:
        aborts = []
        if plan.total_num_scheduled_tokens:
            while self._events and self._events[0]["during"] <= len(self._rows):
                event = self._events.popleft()
                self._inputs.append(event)
                aborts += [event["leave"]] if "leave" in event else []
        for name in aborts:
            self._leave(name)
        names = list(sampled)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
        )
        results = self._scheduler.update_from_output(plan, output)
        stats = next(r.scheduler_stats for r in results.values() if r.scheduler_stats is not None)
        self._counted["queries"] += stats.prefix_cache_stats.queries
        self._counted["hits"] += stats.prefix_cache_stats.hits
        if not plan.total_num_scheduled_tokens:
            return
        details = compute_iteration_details(plan)
        pool = self._scheduler.kv_cache_manager.block_pool
        self._rows.append(
            {
                "prefill_requests": details.num_ctx_requests,
                "prefill_tokens": details.num_ctx_tokens,
                "decode_tokens": details.num_generation_tokens,
                "outputs": [
                    [o.request_id, len(o.new_token_ids), o.finish_reason is not None]
                    for result in results.values()
                    for o in result.outputs
                ],
                "running": stats.num_running_reqs,
                "waiting": stats.num_waiting_reqs,
                "deferred": stats.num_skipped_waiting_reqs,
                "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
                **self._counted,
            }
        )


def main() -> None:
    """Reads the cases, writes what the scheduler did with each."""
    init_none_hash(sha256)
    cases = json.load(sys.stdin)
    json.dump([Core(case, sys.argv[1]).run() for case in cases], sys.stdout)


if __name__ == "__main__":
    main()
