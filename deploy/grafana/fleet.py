"""Which servers hurt readers most?"""

from deploy.grafana.panels import (
    BLUE,
    BURN,
    CAUSE_COLOURS,
    ENGINE,
    GOOD_TO_BAD,
    GREEN,
    ORANGE,
    POD,
    RED,
    Board,
    Query,
    Row,
    graph,
    stat,
    states,
    table,
)


def board() -> Board:
    """Which servers hurt readers most?"""
    names = ("namespace", "job", "pod", "instance")
    chosen = "&".join(f"var-{name}=${{__data.fields.{name}}}" for name in names)
    links = [
        {"title": title, "url": f"/d/{uid}?{chosen}&var-datasource=${{datasource}}&${{__url_time_range}}"}
        for uid, title in (("stallwatch-why", "Why"), ("stallwatch-readers", "Readers now"))
    ]

    def share(window: str) -> str:
        return (
            f"(sum by ({ENGINE}) (rate(stallwatch_slo_missed_seconds_total{{E}}[{window}])) "
            f"/ (sum by ({ENGINE}) (rate(stallwatch_slo_seconds_total{{E}}[{window}])) > 0))"
        )

    burn = f"{share('1h')} / on ({POD}) group_left () (1 - max by ({POD}) (stallwatch_slo_target_ratio{{S}}))"
    columns = {
        "burn, 1h": (burn, "none"),
        "missed, 5m": (share("5m"), "percentunit"),
        "waits now": (f"max by ({ENGINE}) (stallwatch_stall_active{{E}})", "bool_yes_no"),
        "longest wait": (f"max by ({ENGINE}) (stallwatch_reader_wait_max_seconds{{E}})", "s"),
        "ITL p99": (
            f'max by ({ENGINE}) (stallwatch_itl_seconds{{E,source="engine",q="0.99",window="5m"}})',
            "s",
        ),
        "stalled": (f"sum by ({ENGINE}) (increase(stallwatch_stall_seconds_total{{E}}[$__range]))", "s"),
        "prefill": (
            f'max by ({ENGINE}) (stallwatch_scheduled_prefill_tokens_per_step{{E,stat="max"}})',
            "short",
        ),
        "advised": (f"min by ({ENGINE}) (stallwatch_prefill_budget_tokens{{E}})", "short"),
        "running": (f'sum by ({ENGINE}) (stallwatch_engine_requests{{E,state="running"}})', "short"),
        "KV cache": (f"max by ({ENGINE}) (stallwatch_engine_kv_cache_usage_ratio{{E}})", "percentunit"),
    }
    service = "{{namespace}}/{{job}}"
    # A pod's name where there is one, else the instance's.
    called = (
        f"label_replace(label_replace(max by ({ENGINE}) (stallwatch_stall_active{{E}}), "
        '"server", "$1", "instance", "(.+)"), "server", "$1", "pod", "(.+)")'
    )
    return Board(
        "stallwatch-fleet",
        "stallwatch / Fleet",
        "All servers, those that hurt readers most first. A click on a pod shows why.",
        (
            Row(
                "All",
                (
                    stat(
                        "Servers watched",
                        "Sidecars that Prometheus scrapes.",
                        "short",
                        "count(stallwatch_build_info{S})",
                        steps=((None, BLUE),),
                        empty="none",
                        section="stallwatchabsent",
                    ),
                    stat(
                        "Readers wait",
                        "Engines with an open stall.",
                        "short",
                        f"sum(max by ({ENGINE}) (stallwatch_stall_active{{E}}))",
                        steps=((None, GREEN), (1.0, RED)),
                        empty="not known",
                        section="stallwatchreadersfrozen",
                    ),
                    stat(
                        "Servers gone",
                        "Servers that answered once and refuse connections now.",
                        "short",
                        'sum(stallwatch_target_phase{S,phase="gone"})',
                        steps=((None, GREEN), (1.0, RED)),
                        empty="not known",
                        section="stallwatchservergone",
                    ),
                    stat(
                        "Judging nothing",
                        "Serving servers of which not one second was judged in 5 minutes. Idle ones without a canary "
                        "belong here rightly.",
                        "short",
                        f"""
                        count(
                          max by ({POD}) (stallwatch_target_phase{{S,phase="serving"}}) == 1
                          unless on ({POD}) sum by ({POD}) (rate(stallwatch_slo_seconds_total{{S}}[5m])) > 0.05
                        ) or vector(0)
                        """,
                        steps=((None, GREEN), (1.0, ORANGE)),
                        section="stallwatchjudgingnothing",
                    ),
                    stat(
                        "Seconds missed, 1 h",
                        "Share of all judged seconds of the last hour in which a reader waited too long.",
                        "percentunit",
                        "sum(rate(stallwatch_slo_missed_seconds_total{E}[1h])) "
                        "/ sum(rate(stallwatch_slo_seconds_total{E}[1h]))",
                        steps=((None, BLUE),),
                        empty="nothing judged",
                        section="stallwatchbudgetburnfast",
                    ),
                    stat(
                        "Reader-seconds lost",
                        "Stall seconds times the readers that waited, over the chosen time range.",
                        "s",
                        "sum(increase(stallwatch_reader_seconds_lost_total{E}[$__range]))",
                        steps=((None, BLUE),),
                        empty="not known",
                    ),
                    table(
                        "Servers, worst first",
                        "Burn is the share of missed seconds of the last hour to what the target allows: 1 lasts the "
                        "month, 14 two days. Longest wait of the last 30 s; stalled in the chosen time range; prefill: "
                        "most prompt tokens in a step, above the advised budget the first thing to change. A click on "
                        "a pod or an instance leads to Why.",
                        columns,
                        worst="burn, 1h",
                        links=links,
                        coloured={
                            "burn, 1h": BURN,
                            "longest wait": GOOD_TO_BAD,
                            "waits now": ((None, GREEN), (1.0, RED)),
                        },
                        section="stallwatchbudgetburnfast",
                    ),
                ),
            ),
            Row(
                "Services",
                (
                    graph(
                        "Burn rate by service",
                        "Share of missed seconds of the last hour to what the target allows. Above 1 the month's "
                        "budget will not last; above 14 somebody is paged.",
                        "none",
                        Query(
                            "sum by (namespace, job) (rate(stallwatch_slo_missed_seconds_total{E}[1h])) "
                            "/ sum by (namespace, job) (rate(stallwatch_slo_seconds_total{E}[1h])) "
                            "/ (1 - max by (namespace, job) (stallwatch_slo_target_ratio{S}))",
                            service,
                        ),
                        width=8,
                        section="stallwatchbudgetburnfast",
                    ),
                    graph(
                        "Stall seconds by cause",
                        "Seconds of stalls that were closed, of all servers, by cause: one cause everywhere is "
                        "something shared, a different one each time is not.",
                        "s",
                        Query(
                            "sum by (cause) (increase(stallwatch_stall_seconds_total{E}[$__interval])) > 0",
                            "{{cause}}",
                        ),
                        width=8,
                        bars=True,
                        overrides=CAUSE_COLOURS,
                        section="did-it-work",
                    ),
                    graph(
                        "ITL p99 by service",
                        "99th percentile over all canary streams of a service, from summed buckets: a quantile of the "
                        "fleet, not a mean of quantiles.",
                        "s",
                        Query(
                            "histogram_quantile(0.99, sum by (namespace, job, le) "
                            "(rate(stallwatch_canary_inter_token_latency_seconds_bucket{E}[5m])))",
                            service,
                        ),
                        width=8,
                        log=True,
                        section="stallwatchitlp99aboveobjective",
                    ),
                    states(
                        "Who waits",
                        "Engines with an open stall, at most 40 of them.",
                        Query(
                            f"topk(40, {called} == 1)",
                            "{{server}}/{{engine}}",
                        ),
                        steps=((None, RED),),
                        height=8,
                        axis=200,
                        empty="nobody",
                        section="stallwatchreadersfrozen",
                    ),
                    table(
                        "Versions",
                        "Which vLLM and which model each engine serves.",
                        {"engines": ("count by (version, model_name) (stallwatch_engine_info{E})", "short")},
                        worst="engines",
                        labels=("model_name", "version"),
                        height=5,
                    ),
                ),
            ),
        ),
        span="now-3h",
    )
