// The report of one experiment: the verdict, the three kinds of runs over each other, effects, every run, the timeline.

import { data, element, table } from "./dom.js";
import { UNKNOWN, duration, figure } from "./figures.js";
import { Stack } from "./chart.js";
import { ARMS, ARM_WORDS, SHADES, VERDICTS, estimated, factList, gapColumn, grid, heldColumn, intervalBar, meansTable, section, told, validRuns } from "./parts.js";

const { report, facts, shown } = data();
const main = document.getElementById("main");
let length = report.plan.prompt_tokens[0];
let block = null;

const model = report.identity.server.model ?? "model unknown";
const version = report.identity.server.version ? `vLLM ${report.identity.server.version}` : "version unknown";
const gpus = report.identity.gpus.map((gpu) => gpu.name ?? "GPU");

main.replaceChildren(
  element("header", {}, [
    element("p", { class: "soft", text: "stallwatch experiment" }),
    element("h1", { text: "Is it prefill?" }),
    element("p", { class: "soft", text: [model, version, gpus.length ? `${gpus.length} × ${[...new Set(gpus)].join(", ")}` : "no GPU was read", report.began].join(" · ") }),
  ]),
  ...report.conclusions.map((one) =>
    element("section", { class: `card verdict ${one.verdict}` }, [
      element("p", { class: "badge", text: VERDICTS[one.verdict] ?? one.verdict }),
      element("p", { class: "lead", text: one.statement }),
      element("div", { class: "columns" }, [
        told("Because", one.because), told("Not shown", one.not_shown), told("Next", one.advice),
      ]),
    ]),
  ),
  ...(report.why || report.notes.length
    ? [section(null, [report.why ? element("p", { text: `The experiment did not come to its end: ${report.why}.` }) : null, told("Notes", report.notes)])]
    : []),
);

// --- the three kinds of runs over each other

const place = element("div");
const under = element("div");
const blocks = [...new Set(report.runs.map((run) => run.block))];
const blockChoice = element("select", { "aria-label": "Block", on: { change: () => ((block = Number(blockChoice.value)), draw()) } },
  blocks.map((number) => element("option", { value: number, text: `block ${number}` })));
const lengthChoice = element("select", { "aria-label": "Prompt length", on: { change: () => ((length = Number(lengthChoice.value)), choose(), draw()) } },
  report.plan.prompt_tokens.map((tokens) => element("option", { value: tokens, text: `${figure("tokens", tokens)}` })));
lengthChoice.hidden = report.plan.prompt_tokens.length < 2;
blockChoice.hidden = blocks.length < 2;

main.append(section(null, [
  element("div", { class: "controls" }, [element("h2", { text: "What a reader was waiting, from the moment the prompt was sent" }), lengthChoice, blockChoice]),
  place,
]), section(null, [
  element("div", { class: "controls" }, [element("h2", { text: "What the engine did beside the uncached prompt, on the same clock" })]),
  under,
]));

const LOG = { log: true, least: 0.001, most: 1 };
const gaps = new Stack(place, {
  axis: "elapsed", lane: false, label: "Gaps of the three kinds of runs", onRange: (from, to) => zoom(from, to),
  panels: ARMS.map((arm) => ({
    title: ARM_WORDS[arm], unit: "seconds", height: 80, ...LOG, absent: "No valid run of this kind in this block.",
    lines: [{ at: report.judged_by.slow_gap_seconds, label: "slow" }],
    series: [{ column: arm, label: "gap", shade: SHADES[arm], shape: "blocks", bridge: 0.2 }],
  })),
});
const engine = new Stack(under, {
  axis: "elapsed", lane: false, label: "Engine", onRange: (from, to) => zoom(from, to),
  panels: [
    { title: "Prefill tokens in a step", unit: "tokens_per_step", series: [{ column: "prefill", label: "prefill", shade: 2, shape: "blocks", bridge: 1 }], absent: "No evidence of it was offered." },
    { title: "Engine step", unit: "seconds", ...LOG, series: [{ column: "step", label: "step", shade: 1, shape: "step", bridge: 1 }], absent: "No step was told." },
    { title: "Requests", unit: "requests", series: [{ column: "running", label: "running", shade: 1, shape: "step" }, { column: "waiting", label: "waiting", shade: 2, shape: "step" }], absent: "The metrics page was not read." },
    { title: "KV cache in use", unit: "ratio", most: 0.01, series: [{ column: "kv_usage", label: "in use", shade: 4, shape: "step" }], absent: "The metrics page was not read." },
    ...(gpus.length ? [{ title: "SM clock", unit: "hertz", series: [{ column: "clock", label: "GPU 0", shade: 1, shape: "step" }], absent: "No GPU was read." }] : []),
    { title: "Our own lateness", unit: "seconds", most: 0.05, series: [{ column: "lag", label: "late", shade: 3, shape: "bars" }], absent: "Never 5 ms or more." },
  ],
});

function runOf(arm) {
  return validRuns(report, arm, length).find((run) => run.block === block);
}

/** The block whose runs are all valid, in the middle of the times lost. */
function choose() {
  const whole = blocks.filter((number) => ARMS.every((arm) => validRuns(report, arm, length).some((run) => run.block === number)));
  const any = blocks.filter((number) => validRuns(report, "uncached", length).some((run) => run.block === number));
  const from = whole.length ? whole : any.length ? any : blocks;
  block = from[Math.floor((from.length - 1) / 2)] ?? null;
  blockChoice.value = String(block);
}

let reach = [0, 1];

function draw() {
  const runs = Object.fromEntries(ARMS.map((arm) => [arm, runOf(arm)]));
  const ends = ARMS.map((arm) => (runs[arm] ? runs[arm].timeline.ended - runs[arm].timeline.marked : 0));
  reach = [-Math.min(1, 0.05 * Math.max(...ends)), Math.max(1, ...ends)];
  const times = grid(...reach);
  gaps.range = engine.range = reach;
  gaps.setData(times, Object.fromEntries(ARMS.filter((arm) => runs[arm]).map((arm) => [arm, gapColumn(runs[arm].timeline, times)])));
  engine.setData(times, runs.uncached ? engineColumns(runs.uncached.timeline, times) : {});
  const spans = runs.uncached && runs.uncached.timeline.prompt?.first_token !== null
    ? [{ id: "prompt", start: runs.uncached.timeline.prompt.sent - runs.uncached.timeline.marked,
        end: runs.uncached.timeline.prompt.first_token - runs.uncached.timeline.marked, cause: "prefill", label: "the uncached prompt is computed" }]
    : [];
  engine.setSpans(spans);
}

function engineColumns(timeline, times) {
  const since = (at) => at - timeline.marked;
  const columns = {};
  const at = timeline.engine.at.map(since);
  if (at.length) {
    for (const name of ["running", "waiting", "kv_usage"]) columns[name] = heldColumn(at, timeline.engine[name], times);
  }
  const steps = timeline.steps;
  if (steps.length) {
    const each = (value) => times.map((time) => {
      const seen = steps.find((one) => since(one.since) <= time && time < since(one.until));
      return seen ? value(seen) : null;
    });
    if (steps.some((one) => one.prefill_tokens !== null)) {
      columns.prefill = each((one) => (one.prefill_tokens === null ? null : one.prefill_tokens / Math.max(1, one.steps)));
    }
    columns.step = each((one) => (one.steps ? one.seconds / one.steps : null));
  }
  const gpu = Object.values(timeline.gpus)[0];
  if (gpu && gpu.sm_clock_hertz.some((value) => value !== null)) columns.clock = heldColumn(gpu.at.map(since), gpu.sm_clock_hertz, times);
  if (timeline.lag.length) {
    columns.lag = times.map(() => null);
    for (const [when, lag] of timeline.lag) {
      const slot = Math.round(((since(when) - times[0]) / (times[times.length - 1] - times[0])) * (times.length - 1));
      if (slot >= 0 && slot < times.length) columns.lag[slot] = Math.max(columns.lag[slot] ?? 0, lag);
    }
  }
  return columns;
}

function zoom(from, to) {
  const range = from === null ? reach : [Math.max(from, reach[0]), Math.min(to, reach[1])];
  gaps.setRange(...range);
  engine.setRange(...range);
}

// --- figures

const SHOWN_EFFECTS = ["lost_seconds", "longest_gap_seconds", "itl_p99_seconds", "time_weighted_p99_seconds", "prompt_ttft_seconds"];
for (const one of report.conclusions) {
  const title = report.conclusions.length > 1 ? `, ${figure("tokens", one.prompt_tokens)}` : "";
  const effects = one.effects.filter((effect) => SHOWN_EFFECTS.includes(effect.measure));
  const bounds = (name) => {
    const known = effects.filter((effect) => effect.measure === name).flatMap((effect) => [effect.difference.low, effect.difference.high]);
    const finite = known.filter((value) => value !== null);
    return [Math.min(0, ...finite), Math.max(0, ...finite)];
  };
  main.append(
    section(`Effects with 95 % intervals over blocks${title}`, [
      table(["", "", "difference (95 % interval)", "", "ratio", "blocks"], effects.map((effect) => [
        report.measures[effect.measure].words, `${effect.one} less ${effect.other}`,
        estimated(report.measures[effect.measure].unit, effect.difference),
        intervalBar(effect.difference, ...bounds(effect.measure)),
        effect.ratio ? figure("factor", effect.ratio.mean) : UNKNOWN, String(effect.difference.n),
      ]), { numeric: [2, 4, 5] }),
    ], { wide: true }),
    section(`What was measured in each kind of run${title}`, [meansTable(report, one.prompt_tokens, shown)], { wide: true }),
  );
}

main.append(element("section", { class: "card runs" }, [
  element("h2", { text: "Runs, in their order" }),
  table(["run", "block", "", "lost by a stream", "longest gap", "ITL p50", "ITL p99", "prompt's first token", "cached", "computed", ""], report.runs.map((run) => [
    String(run.run), String(run.block), run.arm,
    ...["lost_seconds", "longest_gap_seconds", "itl_p50_seconds", "itl_p99_seconds", "prompt_ttft_seconds"].map((name) => duration(run.measures[name])),
    ...["cached_tokens", "computed_tokens"].map((name) => figure("count", run.measures[name])),
    run.void.length ? `void: ${run.void.join("; ")}` : "",
  ]), { numeric: [0, 1, 3, 4, 5, 6, 7, 8, 9] }),
  report.left_out.length ? element("p", { class: "soft", text: `${report.left_out.length} runs were left out.` }) : null,
]));

main.append(element("details", { class: "card" }, [
  element("summary", { text: "What was measured, and by which plan" }),
  factList(facts),
]));

choose();
draw();
