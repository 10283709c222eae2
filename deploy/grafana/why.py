"""What was the engine doing in that very moment, and which knob changes it?"""

from deploy.grafana.panels import (
    BUDGET,
    GREY,
    OBJECTIVE,
    OBJECTIVE_LINE,
    Board,
    Query,
    Row,
    cause_rows,
    graph,
    heatmap,
    states,
)


def _vllm(name: str, suffix: str = "") -> str:
    return f'{{__name__=~"vllm[:_]{name}{suffix}",namespace=~"$namespace",pod=~"$pod",engine=~"$engine"}}'


def board() -> Board:
    """What was the engine doing in that very moment, and which knob changes it?"""
    rate = "[$__rate_interval]"
    return Board(
        "stallwatch-why",
        "stallwatch / Why",
        "What the engine, the GPU and the host did while readers waited, on one time axis. Choose one server, put the "
        "cursor on a stall, and read downwards.",
        (
            Row(
                "What readers felt",
                (
                    cause_rows(),
                    heatmap(
                        "Gaps of the canary",
                        "Time between two tokens, as the canary's streams saw it. A second band above the usual one is "
                        "steps that carry prefill; lone cells far above are freezes. With pulses there are holes "
                        "between them.",
                        "s",
                        "sum by (le) (increase(stallwatch_canary_inter_chunk_latency_seconds_bucket{E}[$__interval]))",
                    ),
                ),
            ),
            Row(
                "Engine steps",
                (
                    graph(
                        "Step time",
                        "Mean duration of the steps that could be told apart, by phase, beside the decode baseline "
                        "(steps without prefill) and its own past. Mixed far above decode is prefill; decode above its "
                        "reference is a slower machine.",
                        "s",
                        OBJECTIVE_LINE,
                        Query(
                            f"sum by (phase) (rate(stallwatch_step_duration_seconds_sum{{E}}{rate})) "
                            f"/ (sum by (phase) (rate(stallwatch_step_duration_seconds_count{{E}}{rate})) > 0)",
                            "{{phase}}",
                        ),
                        Query("max(stallwatch_decode_baseline_seconds{E})", "baseline"),
                        Query("max(stallwatch_decode_baseline_reference_seconds{E})", "baseline, its past"),
                        Query("max(stallwatch_step_age_seconds{E}) > 0.5", "step age"),
                        height=8,
                        log=True,
                        overrides=(OBJECTIVE,),
                        section="stallwatchdecodebaselineshifted",
                    ),
                    graph(
                        "Prefill tokens in a step",
                        "Prompt tokens that one engine step carried: mean and largest of the last 15 s, and the budget "
                        "that would keep 95 % of steps within the objective. Above the budget, readers wait.",
                        "short",
                        Query(
                            "max by (stat) (stallwatch_scheduled_prefill_tokens_per_step{E})",
                            "{{stat}}",
                        ),
                        Query("min(stallwatch_prefill_budget_tokens{E})", "advised budget"),
                        overrides=(BUDGET,),
                        section="prefill",
                    ),
                    graph(
                        "Interference",
                        "How much longer steps took because prompts were computed in them, to the decode baseline, "
                        "over 5 minutes: 0 is none, 1 is twice as slow. Beside it the share of time that was a stall "
                        "with prefill in it.",
                        "percentunit",
                        Query("max by (stat) (stallwatch_interference_ratio{E})", "steps longer, {{stat}}"),
                        Query("max(stallwatch_interference_share_ratio{E})", "time stalled by prefill"),
                        Query(f"sum(rate(stallwatch_interference_seconds_total{{E}}{rate}))", "seconds lost a second"),
                        section="stallwatchinterferencehigh",
                    ),
                    graph(
                        "Prefill backlog",
                        "Prompt tokens of admitted requests that are still to be computed.",
                        "short",
                        Query("sum(stallwatch_prefill_backlog_tokens{E})", "tokens to go"),
                        height=5,
                        section="prefill",
                    ),
                    graph(
                        "Prefill backlog, in time",
                        "How long it takes to compute them at the pace seen: how long this stall will go on.",
                        "s",
                        Query("max(stallwatch_prefill_backlog_eta_seconds{E})", "seconds to go"),
                        height=5,
                        section="prefill",
                    ),
                    graph(
                        "Tokens scheduled",
                        "Tokens a second that steps carried: prompts computed, by the evidence that told it, and "
                        "tokens decoded. Decode falling while prefill rises is the trade that readers pay for.",
                        "short",
                        Query(
                            f"sum by (evidence) (rate(stallwatch_scheduled_prefill_tokens_total{{E}}{rate})) > 0",
                            "prefill ({{evidence}})",
                        ),
                        Query(f"sum(rate(stallwatch_scheduled_decode_tokens_total{{E}}{rate}))", "decode"),
                        log=True,
                        limits={"min": 1.0},
                        section="prefill",
                    ),
                    graph(
                        "Steps",
                        "Engine steps a second that produced output. Few steps with many requests running are long "
                        "steps; none is a freeze.",
                        "suffix:/s",
                        Query(f"sum(rate(stallwatch_engine_steps_total{{E}}{rate}))", "steps"),
                        height=5,
                        section="engine_hang",
                    ),
                ),
            ),
            Row(
                "Step model and prefill budget",
                (
                    graph(
                        "What a step costs without prefill",
                        "The step model: a step takes a + c * decoders + b * prompt tokens. Here a, of every step, and "
                        "c, of each request that decodes, learned from steps without prefill. Both rise on a machine "
                        "that became slower.",
                        "s",
                        Query('max by (term) (stallwatch_step_model_coefficient{E,term=~"a|c"})', "{{term}}"),
                        height=5,
                        log=True,
                        limits={"min": 0.00001},
                        section="stallwatchdecodebaselineshifted",
                    ),
                    graph(
                        "What a prompt token costs",
                        "b of the step model: seconds that one prompt token adds to its step, for half of all prompt "
                        "tokens (b50), for all but a tenth (b90) and a twentieth (b95). It rises with the context "
                        "before the token: deep prompts cost more than long ones.",
                        "s",
                        Query(
                            'max by (term) (stallwatch_step_model_coefficient{E,term=~"b50|b90|b95"})',
                            "{{term}}",
                        ),
                        height=5,
                        section="prefill",
                    ),
                    graph(
                        "Prefill budget",
                        "Largest prefill in a step that keeps 95 % of steps within the objective, and the contexts "
                        "(tokens of prompt before the prefill) from which that was learned: for deeper prompts it is a "
                        "guess. --max-num-batched-tokens is the budget plus the decoding requests.",
                        "short",
                        Query("min(stallwatch_prefill_budget_tokens{E})", "advised budget"),
                        Query("max by (bound) (stallwatch_prefill_budget_context_tokens{E})", "context, {{bound}}"),
                        height=6,
                        log=True,
                        limits={"min": 1.0},
                        overrides=(BUDGET,),
                        empty="not known yet",
                        section="prefill",
                    ),
                    graph(
                        "How much the step model explains",
                        "Share of the variance of step durations. Below 0.5 the model is poor: no budget is advised.",
                        "percentunit",
                        Query("min(stallwatch_step_model_r2{E})", "explained"),
                        height=5,
                        limits={"min": 0.0, "max": 1.0},
                        section="prefill",
                    ),
                ),
            ),
            Row(
                "Requests and cache",
                (
                    graph(
                        "Requests",
                        "Requests in the engine without the canary's: running, waiting for capacity, or deferred (KV "
                        "transfer, LoRA, grammar). An empty queue is no proof that readers are fine.",
                        "short",
                        Query("sum by (state) (stallwatch_engine_requests{E})", "{{state}}"),
                        section="admission",
                    ),
                    graph(
                        "KV cache",
                        "Share of KV cache blocks in use. A saw-tooth at the top with preemptions is thrashing.",
                        "percentunit",
                        Query("max(stallwatch_engine_kv_cache_usage_ratio{E})", "in use"),
                        limits={"min": 0.0, "max": 1.0},
                        section="admission",
                    ),
                    graph(
                        "Preemptions",
                        "Requests a second that were thrown out of the cache and are computed again.",
                        "suffix:/s",
                        Query(f"sum(rate(stallwatch_engine_preemptions_total{{E}}{rate}))", "preemptions"),
                        height=5,
                        least=1.0,
                        section="preemption",
                    ),
                    graph(
                        "Prompt tokens: computed and cached",
                        "Prompt tokens a second of requests that got their first token: computed, or found in the "
                        "prefix cache. A long prompt from the cache is harmless.",
                        "short",
                        Query(
                            f"sum by (source) (rate(stallwatch_engine_prompt_tokens_total{{E}}{rate}))", "{{source}}"
                        ),
                        section="prefill",
                    ),
                ),
            ),
            Row(
                "GPU",
                (
                    graph(
                        "SM clock, to its own usual one",
                        "Clock of each GPU while busy, to what it usually has when busy. Below 85 % while readers wait "
                        "is an alert; a power cap bit alone proves nothing.",
                        "percentunit",
                        Query("min by (gpu) (stallwatch_gpu_sm_clock_ratio{S})", "GPU {{gpu}}"),
                        section="gpu_clock",
                        limits={"min": 0.0, "max": 1.2},
                    ),
                    graph(
                        "Busy",
                        "Share of time in which a kernel ran, in which memory was read or written, and in which DRAM "
                        "moved data (Hopper and later). Busy and slow is prefill or a low clock; idle with requests "
                        "running is the host.",
                        "percentunit",
                        Query("avg by (gpu) (stallwatch_gpu_utilization_ratio{S})", "GPU {{gpu}} kernels"),
                        Query("avg by (gpu) (stallwatch_gpu_memory_utilization_ratio{S})", "GPU {{gpu}} memory"),
                        Query("avg by (gpu) (stallwatch_gpu_dram_active_ratio{S})", "GPU {{gpu}} DRAM"),
                        Query("avg by (gpu) (stallwatch_gpu_sm_occupancy_ratio{S})", "GPU {{gpu}} occupancy"),
                        section="gpu_idle",
                    ),
                    graph(
                        "Power",
                        "Mean power of the last second, and the limit that the driver enforces. At the limit under "
                        "load is normal.",
                        "watt",
                        Query("max by (gpu) (stallwatch_gpu_power_watts{S})", "GPU {{gpu}}"),
                        Query("max(stallwatch_gpu_power_limit_watts{S})", "limit"),
                        height=5,
                        section="gpu_clock",
                    ),
                    graph(
                        "SM clock",
                        "Lowest clock of the last second.",
                        "hertz",
                        Query('min by (gpu) (stallwatch_gpu_sm_clock_hertz{S,stat="min"})', "GPU {{gpu}}"),
                        height=5,
                        section="gpu_clock",
                    ),
                    states(
                        "Reasons that the driver names for the clock",
                        "sw_power_cap is normal under load. hw_slowdown, hw_thermal_slowdown and hw_power_brake are "
                        "not.",
                        Query("max by (reason) (stallwatch_gpu_clock_event{S}) == 1", "{{reason}}"),
                        steps=((None, GREY),),
                        height=5,
                        empty="none",
                        section="gpu_clock",
                    ),
                    graph(
                        "Temperature",
                        "Temperature of the GPU's core.",
                        "celsius",
                        Query("max by (gpu) (stallwatch_gpu_temperature_celsius{S})", "GPU {{gpu}}"),
                        width=12,
                    ),
                    graph(
                        "Device memory",
                        "Memory in use; vLLM takes its share at the start, so this hardly moves.",
                        "percentunit",
                        Query(
                            "max by (gpu) (stallwatch_gpu_memory_used_bytes{S} / stallwatch_gpu_memory_total_bytes{S})",
                            "GPU {{gpu}}",
                        ),
                        width=12,
                    ),
                ),
            ),
            Row(
                "Single steps and drafts",
                (
                    heatmap(
                        "Prefill tokens of single steps",
                        "How many prompt tokens single steps carried: all with the plugin, else those that could be "
                        "told apart. A band at the token budget is a long prompt in chunks.",
                        "short",
                        "sum by (le) (increase(stallwatch_step_prefill_tokens_bucket{E}[$__interval]))",
                        height=6,
                        section="prefill",
                    ),
                    graph(
                        "Draft tokens accepted",
                        "Share of drafted tokens that were accepted (speculative decoding only). Falling acceptance "
                        "makes every reader slower without any stall.",
                        "percentunit",
                        Query("min(stallwatch_engine_spec_acceptance_ratio{E})", "accepted"),
                        height=5,
                        empty="no speculative decoding",
                        section="stallwatchdecodebaselineshifted",
                    ),
                ),
                closed=True,
            ),
            Row(
                "Host and links",
                (
                    graph(
                        "Pressure",
                        "Share of time in which some tasks of the host waited for memory, disk or CPU, and in which "
                        "vLLM's container was throttled.",
                        "percentunit",
                        Query(
                            "max by (resource) "
                            f'(rate(stallwatch_pressure_waiting_seconds_total{{S,kind="some"}}{rate}))',
                            "{{resource}}",
                        ),
                        Query(f"max(rate(stallwatch_engine_throttled_seconds_total{{S}}{rate}))", "throttled"),
                        width=12,
                        section="host_pressure",
                    ),
                    graph(
                        "Congestion on the wire",
                        "Congestion and loss counters of the RDMA ports, by the driver's name. Rising while GPUs wait "
                        "is the fabric.",
                        "suffix:/s",
                        Query(
                            f"sum by (device, counter) (rate(stallwatch_rdma_congestion_total{{S}}{rate}))",
                            "{{device}} {{counter}}",
                        ),
                        width=12,
                        section="interconnect",
                    ),
                    graph(
                        "Bytes between GPUs",
                        "NVLink and PCIe throughput of each GPU, and of the RDMA ports.",
                        "Bps",
                        Query(
                            f"sum by (direction) (rate(stallwatch_gpu_nvlink_bytes_total{{S}}{rate}))",
                            "NVLink {{direction}}",
                        ),
                        Query("sum by (direction) (stallwatch_gpu_pcie_bytes_per_second{S})", "PCIe {{direction}}"),
                        Query(
                            f"sum by (direction) (rate(stallwatch_rdma_bytes_total{{S}}{rate}))", "RDMA {{direction}}"
                        ),
                        width=12,
                        empty="no such counters here",
                        section="interconnect",
                    ),
                    graph(
                        "Faults of the hardware",
                        "Xid and ECC errors in the last 5 minutes, and ports whose link is down. Anything but 0 is "
                        "worth a look.",
                        "short",
                        Query("sum by (gpu) (increase(stallwatch_gpu_xid_errors_total{S}[5m]))", "Xid, GPU {{gpu}}"),
                        Query(
                            'sum by (gpu) (increase(stallwatch_gpu_ecc_errors_total{S,kind="uncorrected"}[5m]))',
                            "ECC, GPU {{gpu}}",
                        ),
                        Query("sum by (device) (stallwatch_rdma_link_active{S} == bool 0)", "{{device}} down"),
                        width=12,
                        least=1.0,
                        section="gpu_clock",
                    ),
                ),
                closed=True,
            ),
            Row(
                "vLLM's own page (when Prometheus scrapes it too)",
                (
                    heatmap(
                        "Inter-token latency of all readers",
                        "vLLM's own histogram: every reader, in vLLM's buckets. It is silent during a freeze, because "
                        "no token comes.",
                        "s",
                        f"sum by (le) (increase({_vllm('inter_token_latency_seconds', '_bucket')}[$__interval]))",
                    ),
                    graph(
                        "Prompt lengths",
                        "Median and 99th percentile of the prompts of finished requests, in tokens.",
                        "short",
                        *(
                            Query(
                                f"histogram_quantile({q}, sum by (le) "
                                f"(rate({_vllm('request_prompt_tokens', '_bucket')}[5m])))",
                                f"p{float(q) * 100:.0f}",
                            )
                            for q in ("0.5", "0.99")
                        ),
                        width=12,
                        section="prefill",
                    ),
                    graph(
                        "First token and whole answer, of all readers",
                        "95th percentile over 5 minutes, by vLLM's own histograms.",
                        "s",
                        *(
                            Query(f"histogram_quantile(0.95, sum by (le) (rate({_vllm(name, '_bucket')}[5m])))", title)
                            for name, title in (
                                ("time_to_first_token_seconds", "first token"),
                                ("request_queue_time_seconds", "in the queue"),
                                ("request_prefill_time_seconds", "prefill"),
                                ("e2e_request_latency_seconds", "whole answer"),
                            )
                        ),
                        width=12,
                        log=True,
                    ),
                    graph(
                        "Requests finished",
                        "Requests a second that finished, by reason. Aborts that rise with waits are people who gave "
                        "up.",
                        "suffix:/s",
                        Query(
                            f"sum by (finished_reason) (rate({_vllm('request_success_total')}{rate}))",
                            "{{finished_reason}}",
                        ),
                        width=12,
                    ),
                    graph(
                        "Prefix cache hits",
                        "Share of the prompt tokens asked for that were in the prefix cache. A drop means that prompts "
                        "are computed again.",
                        "percentunit",
                        Query(
                            f"sum(rate({_vllm('prefix_cache_hits_total')}{rate})) "
                            f"/ sum(rate({_vllm('prefix_cache_queries_total')}{rate}))",
                            "hits",
                        ),
                        width=12,
                        section="prefill",
                    ),
                ),
                closed=True,
            ),
        ),
    )
