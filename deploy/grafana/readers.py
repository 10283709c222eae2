"""Are readers waiting now, for how long, and how much of the promise is gone?"""

from deploy.grafana.panels import (
    ALLOWED,
    BLUE,
    BUDGET_LEFT,
    CAUSE_COLOURS,
    GOOD_TO_BAD,
    GREEN,
    GREY,
    OBJECTIVE,
    OBJECTIVE_LINE,
    ORANGE,
    POD,
    RED,
    Board,
    Query,
    Row,
    cause_rows,
    graph,
    heatmap,
    paint,
    stat,
    values,
)

_LINES = (
    *(paint(f"all readers p{q}", colour) for q, colour in ((50, "#9cc3f5"), (95, "#4f8fdc"), (99, "#2b5ea8"))),
    *(paint(f"canary p{q}", colour) for q, colour in ((50, "#a5dcb5"), (95, "#3fa66b"), (99, "#21683f"))),
    *(paint(f"by time p{q}", colour) for q, colour in ((95, ORANGE), (99, RED))),
)


def board() -> Board:
    """Are readers waiting now, for how long, and how much of the promise is gone?"""
    verdict = """
        max(
          6 * stallwatch_target_phase{S,phase="gone"}
          or 5 * stallwatch_stall_active{E}
          or 4 * (
            time() - stallwatch_last_poll_success_timestamp_seconds{S,source="engine"} > bool 60
            and on (POD) stallwatch_target_phase{S,phase="serving"} == 1
          )
          or 3 * (rate(stallwatch_slo_missed_seconds_total{E}[1m]) > bool 0.1)
          or 2 * stallwatch_target_phase{S,phase="starting"}
          or stallwatch_target_phase{S,phase="asleep"}
        )
    """.replace("POD", POD)
    p99 = 'stallwatch_itl_seconds{E,source="engine",q="0.99",window="5m"}'
    above = f"max({p99} > on ({POD}) group_left () max by ({POD}) (stallwatch_slo_itl_objective_seconds{{S}}))"
    budget = """
        clamp_min(
          1 - sum(increase(stallwatch_slo_missed_seconds_total{E}[$__range]))
          / sum(increase(stallwatch_slo_seconds_total{E}[$__range]))
          / (1 - max(stallwatch_slo_target_ratio{S})),
          -1
        )
    """
    return Board(
        "stallwatch-readers",
        "stallwatch / Readers now",
        "Are readers waiting now, for how long, and how much of what was promised is gone? Worst of the selection.",
        (
            Row(
                "Now",
                (
                    stat(
                        "Verdict",
                        "Worst state in the selection: the server is gone; readers wait (a stall is open); blind (its "
                        "metrics have not answered for a minute); late (more than a tenth of the last minute was "
                        "missed); starting; asleep; or served.",
                        "none",
                        verdict,
                        mappings=values(
                            Served=(0, GREEN),
                            Asleep=(1, GREY),
                            Starting=(2, GREY),
                            Late=(3, ORANGE),
                            Blind=(4, ORANGE),
                            Readers_wait=(5, RED),
                            Server_gone=(6, RED),
                        ),
                        empty="no sidecar",
                        section="first-two-minutes",
                    ),
                    stat(
                        "Cause of the open stall",
                        "What the open stall comes down to so far; several when several servers are selected.",
                        "none",
                        Query("max by (cause) (stallwatch_stall_current_cause{E}) == 1", "{{cause}}"),
                        text="name",
                        empty="no stall",
                        steps=((None, ORANGE),),
                        section="stallwatchreadersfrozen",
                    ),
                    stat(
                        "Longest wait, last 30 s",
                        "The longest gap, first-token wait or step age of the last 30 s, open or closed. Above 0.5 s a "
                        "reader notices.",
                        "s",
                        "max(stallwatch_reader_wait_max_seconds{E})",
                        steps=GOOD_TO_BAD,
                        empty="not known",
                    ),
                    stat(
                        "ITL p99, 5 min",
                        "99th percentile of inter-token latency of all readers, by vLLM's own buckets, worst engine. A "
                        "freeze removes tokens: this can stay calm while readers wait.",
                        "s",
                        Query(above, "above the objective"),
                        Query(f"max({p99}) unless {above}", "within the objective"),
                        text="value_and_name",
                        overrides=(paint("above the objective", RED), paint("within the objective", GREEN)),
                        empty="too few tokens",
                        section="stallwatchitlp99aboveobjective",
                    ),
                    stat(
                        "Budget left",
                        "Share of the error budget that is left over the chosen time range: choose 30 days for the "
                        "month's. Below 0 more was missed than the target allows; -100 % is twice that, or more.",
                        "percentunit",
                        budget,
                        steps=BUDGET_LEFT,
                        empty="nothing judged",
                        section="stallwatchbudgetburnfast",
                    ),
                    stat(
                        "Reader-seconds lost",
                        "Stall seconds times the readers that waited, over the chosen time range; a stall counts when "
                        "it is closed.",
                        "s",
                        "sum(increase(stallwatch_reader_seconds_lost_total{E}[$__range]))",
                        steps=((None, BLUE),),
                        empty="not known",
                    ),
                ),
            ),
            Row(
                "What readers feel",
                (
                    cause_rows(),
                    graph(
                        "Inter-token latency, 5 min",
                        "By tokens: half of all tokens came within p50, one in a hundred later than p99. By time: p95 "
                        "says that a twentieth of the time was spent in gaps longer than that; there a freeze shows. "
                        "p99 up and p50 calm is interference, both up is a slow server.",
                        "s",
                        OBJECTIVE_LINE,
                        *(
                            Query(
                                f'max(stallwatch_itl_seconds{{E,source="{source}",q="{q}",window="5m"}})',
                                f"{who} p{float(q) * 100:.0f}",
                            )
                            for source, who in (("engine", "all readers"), ("canary", "canary"))
                            for q in ("0.5", "0.95", "0.99")
                        ),
                        *(
                            Query(
                                f'max(stallwatch_itl_time_weighted_seconds{{E,q="{q}",window="5m"}})',
                                f"by time p{float(q) * 100:.0f}",
                            )
                            for q in ("0.95", "0.99")
                        ),
                        height=9,
                        log=True,
                        overrides=(OBJECTIVE, *_LINES),
                        section="stallwatchitlp99aboveobjective",
                    ),
                    graph(
                        "Waits",
                        "Longest wait of the last 30 s as the canary and the engine's counters saw it, the gap that is "
                        "open now, and for how long no engine step has ended. A slope of one second a second is a "
                        "freeze that goes on.",
                        "s",
                        OBJECTIVE_LINE,
                        Query("max by (source) (stallwatch_reader_wait_max_seconds{E})", "longest, by {{source}}"),
                        Query("max(stallwatch_open_gap_seconds{E})", "open gap"),
                        Query("max(stallwatch_step_age_seconds{E})", "step age"),
                        log=True,
                        overrides=(OBJECTIVE,),
                        section="stallwatchreadersfrozen",
                    ),
                    graph(
                        "First token",
                        "How long the canary's short prompt waits for its first token: admission, not the reading of a "
                        "prompt. p90 above the dashed line is an alert.",
                        "s",
                        Query("max(stallwatch_slo_ttft_objective_seconds{S})", "objective"),
                        *(
                            Query(
                                f"histogram_quantile({q}, sum by (le) "
                                "(rate(stallwatch_canary_time_to_first_token_seconds_bucket{E}[5m])))",
                                f"p{float(q) * 100:.0f}",
                            )
                            for q in ("0.5", "0.9")
                        ),
                        width=12,
                        log=True,
                        overrides=(OBJECTIVE,),
                        section="stallwatchttftaboveobjective",
                    ),
                    graph(
                        "Seconds missed",
                        "Share of the judged seconds in which a reader waited longer than the objective, of 5 minutes "
                        "and of an hour, against what the target allows. Fourteen times the allowed share pages within "
                        "the hour.",
                        "percentunit",
                        Query("1 - max(stallwatch_slo_target_ratio{S})", "allowed"),
                        *(
                            Query(
                                f"sum(rate(stallwatch_slo_missed_seconds_total{{E}}[{window}])) "
                                f"/ sum(rate(stallwatch_slo_seconds_total{{E}}[{window}]))",
                                f"missed, {window}",
                            )
                            for window in ("5m", "1h")
                        ),
                        width=12,
                        overrides=(ALLOWED,),
                        section="stallwatchbudgetburnfast",
                    ),
                ),
            ),
            Row(
                "Stalls",
                (
                    graph(
                        "Stall seconds by cause",
                        "Seconds of stalls by cause, in the minute in which they were closed.",
                        "s",
                        Query(
                            "sum by (cause) (increase(stallwatch_stall_seconds_total{E}[$__interval])) > 0", "{{cause}}"
                        ),
                        width=12,
                        bars=True,
                        overrides=CAUSE_COLOURS,
                        section="did-it-work",
                    ),
                    graph(
                        "Tokens late, of all readers",
                        "Share of all readers' tokens that came later than the largest of vLLM's bucket edges that is "
                        "not above the objective. Freezes hardly show here: they have few tokens.",
                        "percentunit",
                        Query(
                            "1 - sum(rate(stallwatch_engine_itl_good_total{E}[$__rate_interval])) "
                            "/ sum(rate(stallwatch_engine_itl_total{E}[$__rate_interval]))",
                            "late",
                        ),
                        Query(
                            "sum(rate(stallwatch_slo_missed_events_total{E}[$__rate_interval])) "
                            "/ sum(rate(stallwatch_slo_events_total{E}[$__rate_interval]))",
                            "canary's tokens missed",
                        ),
                        width=12,
                        section="stallwatchreaderslate",
                    ),
                    heatmap(
                        "How long stalls last",
                        "Closed stalls by their length from begin to end. Many short ones and one long one want "
                        "different remedies.",
                        "s",
                        "sum by (le) (increase(stallwatch_stall_duration_seconds_bucket{E}[$__interval]))",
                        height=6,
                    ),
                ),
            ),
        ),
    )
