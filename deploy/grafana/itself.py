"""Can what stallwatch says be believed?"""

from deploy.grafana.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    POD,
    RED,
    Board,
    Query,
    Row,
    graph,
    other_unit,
    paint,
    stat,
    states,
    table,
    values,
)


def _ours(name: str) -> str:
    return f"{name}{{S}} and on ({POD}) stallwatch_build_info{{S}}"


def board() -> Board:
    """Can what stallwatch says be believed?"""
    rate = "[$__rate_interval]"
    phases = {"serving": GREEN, "starting": BLUE, "asleep": GREY, "gone": RED}
    return Board(
        "stallwatch-self",
        "stallwatch / stallwatch itself",
        "Can what stallwatch says be believed? Sources, canary, our own lateness, what it costs.",
        (
            Row(
                "Sources",
                (
                    stat(
                        "Version",
                        "Versions that run in the selection.",
                        "none",
                        Query("max by (version) (stallwatch_build_info{S})", "{{version}}"),
                        text="name",
                        steps=((None, BLUE),),
                        empty="no sidecar",
                    ),
                    stat(
                        "Oldest poll",
                        "Time since the last successful poll of vLLM's metrics, worst sidecar. A minute is an alert.",
                        "s",
                        'max(time() - stallwatch_last_poll_success_timestamp_seconds{S,source="engine"})',
                        steps=((None, GREEN), (15.0, ORANGE), (60.0, RED)),
                        empty="not known",
                        section="stallwatchblind",
                    ),
                    stat(
                        "Our own lateness",
                        "Worst lateness of our event loop in 30 s. From the objective on, gaps of that size cannot be "
                        "judged.",
                        "s",
                        "max(stallwatch_observer_lag_seconds{S})",
                        steps=((None, GREEN), (0.05, ORANGE), (0.1, RED)),
                        empty="not known",
                        section="stallwatchobserverstarved",
                    ),
                    stat(
                        "Time judged",
                        "Share of the last 5 minutes in which readers' waits were judged, worst engine.",
                        "percentunit",
                        "min(rate(stallwatch_slo_seconds_total{E}[5m]))",
                        steps=((None, RED), (0.05, ORANGE), (0.8, GREEN)),
                        empty="nothing",
                        section="stallwatchjudgingnothing",
                    ),
                    stat(
                        "Figures that vLLM lacks",
                        "Figures that stallwatch asked for and that this server does not have; the table below names "
                        "them.",
                        "short",
                        "count(stallwatch_engine_metric_missing{S} == 1) or vector(0)",
                        steps=((None, BLUE),),
                        section="stallwatchjudgingnothing",
                    ),
                    stat(
                        "Canary's last success",
                        "Time since a canary stream last ended as it should.",
                        "s",
                        "max(time() - stallwatch_canary_last_success_timestamp_seconds{S})",
                        steps=((None, GREEN), (120.0, ORANGE), (900.0, RED)),
                        empty="none yet",
                        section="stallwatchcanarysilent",
                    ),
                    states(
                        "Sources",
                        "Whether each source answers. Without the engine's metrics causes are not known, without the "
                        "canary the path is not seen, without the GPU a low clock cannot be named.",
                        Query("min by (source) (stallwatch_source_up{S})", "{{source}}"),
                        mappings=values(up=(1, GREEN), down=(0, RED)),
                        height=5,
                        section="stallwatchblind",
                    ),
                    states(
                        "Phase of the server",
                        "serving, starting, asleep or gone. Only a serving server is judged.",
                        Query("max by (phase) (stallwatch_target_phase{S}) == 1", "{{phase}}"),
                        overrides=tuple(paint(name, colour) for name, colour in phases.items()),
                        height=5,
                        section="stallwatchservergone",
                    ),
                    graph(
                        "How long polls take",
                        "Of the last poll of each source. The engine's grows when vLLM's API process is busy.",
                        "s",
                        Query("max by (source) (stallwatch_source_poll_duration_seconds{S})", "{{source}}"),
                        width=12,
                        log=True,
                        limits={"min": 0.0001},
                        section="delivery",
                    ),
                    graph(
                        "Polls that failed",
                        "Failures a second by source and reason.",
                        "suffix:/s",
                        Query(
                            f"sum by (source, reason) (rate(stallwatch_source_failures_total{{S}}{rate})) > 0",
                            "{{source}}: {{reason}}",
                        ),
                        width=12,
                        empty="none failed",
                        section="stallwatchmetricsunreachable",
                    ),
                ),
            ),
            Row(
                "Canary",
                (
                    graph(
                        "Streams by outcome",
                        "Canary streams that ended, a minute. Failing is not slow: a stream that times out counts as "
                        "slow.",
                        "short",
                        Query(
                            "sum by (outcome) (increase(stallwatch_canary_requests_total{S}[1m])) > 0", "{{outcome}}"
                        ),
                        Query(
                            "sum by (reason) (increase(stallwatch_canary_skipped_total{S}[1m])) > 0",
                            "skipped: {{reason}}",
                        ),
                        width=12,
                        section="stallwatchcanaryfailing",
                    ),
                    graph(
                        "What the canary costs",
                        "Tokens a minute that canary streams received, and the share of time in which one was open. "
                        "`canary.tokens_per_minute` bounds the first.",
                        "short",
                        Query("sum(rate(stallwatch_canary_tokens_total{S}[5m])) * 60", "tokens a minute"),
                        Query("sum(rate(stallwatch_stream_seconds_total{E}[5m]))", "streams open"),
                        Query("sum(stallwatch_canary_enabled{S})", "canaries switched on"),
                        overrides=(other_unit("streams open|canaries switched on", "short"),),
                        width=12,
                    ),
                    graph(
                        "Samples behind the quantiles",
                        "Samples in the windows: p95 needs 60 and p99 needs 200, below that the figure is absent.",
                        "short",
                        Query("min by (source, window) (stallwatch_itl_samples{E})", "{{source}}, {{window}}"),
                        width=12,
                        section="stallwatchitlp99aboveobjective",
                    ),
                    graph(
                        "Stalls found",
                        "Stalls that were closed, by kind, in the minute.",
                        "short",
                        Query("sum by (kind) (increase(stallwatch_stalls_total{E}[$__interval])) > 0", "{{kind}}"),
                        width=12,
                        bars=True,
                    ),
                ),
            ),
            Row(
                "Ourselves",
                (
                    graph(
                        "Lateness and throttling",
                        "How late our event loop ran, for which share of time our container was throttled, and how "
                        "many gaps a minute were left out because our lateness may explain them.",
                        "s",
                        Query("max(stallwatch_observer_lag_seconds{S})", "lateness"),
                        Query(f"max(rate(stallwatch_observer_throttled_seconds_total{{S}}{rate}))", "throttled"),
                        Query("sum(increase(stallwatch_observer_excluded_gaps_total{S}[1m]))", "gaps left out"),
                        width=12,
                        least=0.1,
                        overrides=(other_unit("throttled|gaps left out", "short"),),
                        section="stallwatchobserverstarved",
                    ),
                    graph(
                        "CPU and memory of the sidecar",
                        "Cores in use and resident memory, largest of the selection.",
                        "short",
                        Query(
                            f"max(rate(process_cpu_seconds_total{{S}}{rate}) "
                            f"and on ({POD}) stallwatch_build_info{{S}})",
                            "cores",
                        ),
                        Query(f"max({_ours('process_resident_memory_bytes')})", "memory"),
                        width=12,
                        overrides=(other_unit("memory", "bytes"),),
                    ),
                    graph(
                        "What the sidecar costs Prometheus",
                        "Series of one scrape, and how long it takes; largest of the selection.",
                        "short",
                        Query(f"max({_ours('scrape_samples_scraped')})", "samples a scrape"),
                        Query(f"max({_ours('scrape_duration_seconds')})", "duration"),
                        width=12,
                        overrides=(other_unit("duration", "s"),),
                    ),
                    graph(
                        "Incident bundles and recordings",
                        "Bundles written, bundles that could not be written, and parts of a recording that are lost.",
                        "short",
                        *(
                            Query(f"sum(increase(stallwatch_{name}_total{{S}}[$__interval]))", title)
                            for name, title in (
                                ("incidents_written", "written"),
                                ("incidents_failed", "failed"),
                                ("recording_failures", "recording, lost parts"),
                            )
                        ),
                        bars=True,
                        width=12,
                        least=1.0,
                    ),
                    table(
                        "What this vLLM does not tell",
                        "Figures that stallwatch asked for and did not get. Which version has them: "
                        "docs/how-it-judges.md.",
                        {"servers": ("count by (field) (stallwatch_engine_metric_missing{S} == 1)", "short")},
                        worst="servers",
                        labels=("field",),
                        width=10,
                        height=6,
                        empty="nothing is missing",
                        section="stallwatchjudgingnothing",
                    ),
                    table(
                        "GPUs seen",
                        "Which GPUs are read, and how sure it is that they are vLLM's: selected, container or node.",
                        {
                            "GPUs": (
                                "count by (pod, instance, gpu, name, driver, scope) (stallwatch_gpu_info{S})",
                                "short",
                            )
                        },
                        worst="gpu",
                        labels=("pod", "instance", "gpu", "name", "driver", "scope"),
                        width=14,
                        height=6,
                        empty="no GPU counters",
                        section="stallwatchnvmldown",
                    ),
                ),
            ),
        ),
    )
