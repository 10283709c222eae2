// The report of a sweep: the trade-off curve, each measure against the value, what became of each value.

import { data, element, table } from "./dom.js";
import { figure } from "./figures.js";
import { Stack } from "./chart.js";
import { VERDICTS, estimateCell, factList, section } from "./parts.js";

const { report, facts } = data();
const page = document.getElementById("main");
const first = report.points.find((point) => point.experiment)?.experiment;
const server = first?.identity.server ?? {};

page.replaceChildren(
  element("header", {}, [
    element("p", { class: "soft", text: "stallwatch experiment" }),
    element("h1", { text: `What ${report.parameter} costs whom` }),
    element("p", { class: "soft", text: [server.model ?? "model unknown", server.version ? `vLLM ${server.version}` : "version unknown", report.began].join(" · ") }),
  ]),
  ...(report.why ? [section(null, [element("p", { text: `The sweep did not come to its end: ${report.why}.` })])] : []),
);

const PANELS = [
  ["beside_itl_p99_seconds", "seconds", 2], ["longest_gap_seconds", "seconds", 2], ["lost_seconds", "seconds", 2],
  ["prompt_ttft_seconds", "seconds", 1], ["total_tokens_per_second", "tokens_per_second", 4],
];

for (const curve of report.curves) {
  const title = report.curves.length > 1 ? `, ${figure("tokens", curve.prompt_tokens)}` : "";
  page.append(element("section", { class: "card verdict" }, curve.statements.map((text, place) => element("p", { class: place ? "" : "lead", text }))));
  tradeOff(curve, title);
  againstValue(curve, title);
  const names = Object.keys(report.measures);
  page.append(section(`Means over valid runs beside the uncached prompt, with 95 % intervals${title}`, [
    table([report.parameter, ...curve.points.map((point) => point.value + marked(curve, point))], names.map((name) => [
      report.measures[name].words, ...curve.points.map((point) => estimateCell(report.measures[name].unit, point.measures[name])),
    ]), { numeric: curve.points.map((_, place) => place + 1) }),
  ], { wide: true }));
}

function marked(curve, point) {
  const words = [curve.knee === point.value ? "knee" : "", curve.meets_objective === point.value ? "meets the objective" : ""].filter(Boolean);
  return words.length ? ` (${words.join(", ")})` : "";
}

/** Readers' p99 against the prompt's first token, a point a value. */
function tradeOff(curve, title) {
  const known = curve.points.filter((point) => point.measures.prompt_ttft_seconds && point.measures.beside_itl_p99_seconds);
  if (known.length < 2) return;
  const points = known.map((point) => ({
    x: point.measures.prompt_ttft_seconds.mean, y: point.measures.beside_itl_p99_seconds.mean, value: point.value,
  })).sort((one, other) => one.x - other.x);
  // Joined up in another order than that of the values, points would show a curve that there is not.
  const falling = points.every((point, place) => place === 0 || point.y <= points[place - 1].y);
  const holder = element("div");
  page.append(section(`The trade-off: readers against the long prompt${title}`, [
    element("p", { class: "soft", text: `To the left the prompt's first token comes sooner, further down readers wait less; a point a value of ${report.parameter}.` }),
    holder,
    element("p", { class: "soft", text: `From left to right: ${points.map((point) => `${point.value} (${figure("seconds", point.y)})`).join(", ")}.` }),
  ]));
  const wide = points[points.length - 1].x - points[0].x || 1;
  const range = [Math.max(0, points[0].x - wide * 0.1), points[points.length - 1].x + wide * 0.1];
  const chart = new Stack(holder, {
    axis: "elapsed", lane: false, label: "Trade-off", onRange: (from, to) => (from === null ? chart.setRange(...range) : chart.setRange(from, to)),
    panels: [{
      title: "ITL p99 against the prompt's first token", unit: "seconds", height: 200,
      lines: [{ at: report.objective_seconds, label: "promised" }],
      series: [...(falling ? [{ column: "line", label: "curve", shade: 3, bridge: 1e9 }] : []), { column: "dots", label: "p99", shade: 2, shape: "dots", bridge: 1e9 }],
    }],
  });
  chart.range = range;
  chart.setData(points.map((point) => point.x), {
    ...(falling ? { line: points.map((point) => point.y) } : {}), dots: points.map((point) => point.y),
  });
}

/** Each measure over the values, where they are numbers. */
function againstValue(curve, title) {
  const numbers = curve.points.filter((point) => Number.isFinite(Number(point.value)));
  if (numbers.length < 2) return;
  const holder = element("div");
  page.append(section(`Against ${report.parameter}${title}`, [holder]));
  const times = numbers.map((point) => Number(point.value));
  const wide = times[times.length - 1] - times[0];
  const range = [times[0] - wide * 0.05, times[times.length - 1] + wide * 0.05];
  const known = PANELS.filter(([name]) => numbers.some((point) => point.measures[name]));
  const chart = new Stack(holder, {
    axis: "number", lane: false, label: `Measures against ${report.parameter}`, onRange: (from, to) => (from === null ? chart.setRange(...range) : chart.setRange(from, to)),
    panels: known.map(([name, unit, shade]) => ({
      title: report.measures[name].words, unit,
      lines: name === "beside_itl_p99_seconds" ? [{ at: report.objective_seconds, label: "promised" }] : [],
      series: [
        { column: name, label: "mean", shade, bridge: 1e9 },
        { column: `${name}-low`, label: "95 % from", shade, dash: [3, 3], bridge: 1e9 },
        { column: `${name}-high`, label: "to", shade, dash: [3, 3], bridge: 1e9 },
      ],
    })),
  });
  chart.range = range;
  chart.setData(times, Object.fromEntries(known.flatMap(([name]) => ["mean", "low", "high"].map((end) => [
    end === "mean" ? name : `${name}-${end}`, numbers.map((point) => point.measures[name]?.[end] ?? null),
  ]))));
}

page.append(section("Each value", [
  table([report.parameter, "server ready after", "runs", "void", "is it prefill?"], report.points.map((point) => point.experiment
    ? [point.value, figure("seconds", point.start_seconds), String(point.experiment.runs.length),
      String(point.experiment.runs.filter((run) => run.void.length).length),
      point.experiment.conclusions.map((one) => VERDICTS[one.verdict] ?? one.verdict).join(", ")]
    : [point.value, "", "", "", `left out: ${point.problem ?? "not tried"}`]), { numeric: [1, 2, 3] }),
  element("p", { class: "mono", text: report.template }),
], { wide: true }));

page.append(element("details", { class: "card" }, [element("summary", { text: "What was measured, and by which plan" }), factList(facts)]));
