// What the reports of experiments share: kinds of runs and their colours, gaps as columns, tables of facts.

import { element, table } from "./dom.js";
import { UNKNOWN, figure } from "./figures.js";

export const ARMS = ["alone", "uncached", "cached"];
export const SHADES = { alone: 3, uncached: 2, cached: 1 };
export const ARM_WORDS = {
  alone: "streams alone",
  uncached: "beside the uncached prompt",
  cached: "beside the cached prompt",
};
export const VERDICTS = {
  prefill: "It is prefill",
  partly: "Partly prefill",
  either_way: "Not prefill: cached or not",
  no_pause: "No pause",
  contradicted: "Another cause was seen",
  inconclusive: "Inconclusive",
};

const PLACES = 700;

/** Times from `from` to `to`, evenly. */
export function grid(from, to, places = PLACES) {
  return Array.from({ length: places + 1 }, (_, place) => from + ((to - from) * place) / places);
}

/** At each time the longest gap that any stream of a run is in; times are from the run's mark. */
export function gapColumn(timeline, times) {
  const column = times.map(() => null);
  const step = times.length > 1 ? times[1] - times[0] : 1;
  for (const stream of timeline.streams) {
    for (let place = 1; place < stream.at.length; place += 1) {
      const start = stream.at[place - 1] - timeline.marked, end = stream.at[place] - timeline.marked;
      const last = Math.min(times.length - 1, Math.floor((end - times[0]) / step));
      for (let slot = Math.max(0, Math.ceil((start - times[0]) / step)); slot <= last; slot += 1) {
        column[slot] = Math.max(column[slot] ?? 0, end - start);
      }
      // A gap between two slots counts in the one after it.
      const next = Math.ceil((end - times[0]) / step);
      if (next >= 0 && next < times.length) column[next] = Math.max(column[next] ?? 0, end - start);
    }
  }
  return column;
}

/** Values seen at moments, held at the times of a grid until the next one. */
export function heldColumn(at, values, times) {
  const column = times.map(() => null);
  let place = -1;
  times.forEach((time, slot) => {
    while (place + 1 < at.length && at[place + 1] <= time) place += 1;
    if (place >= 0 && time <= at[at.length - 1] + 1) column[slot] = values[place];
  });
  return column;
}

/** A mean with its interval as text. */
export function estimated(unit, seen) {
  if (!seen) return UNKNOWN;
  // What is nothing at the precision shown is no minus nothing either.
  const least = unit === "seconds" ? 5e-6 : 5e-3;
  const [mean, low, high] = [seen.mean, seen.low, seen.high].map((value) => (value !== null && Math.abs(value) < least ? 0 : value));
  if (low === null || high === null) return figure(unit, mean);
  return `${figure(unit, mean)} (${figure(unit, low)} to ${figure(unit, high)})`;
}

/** The same on two lines, for tables with many columns. */
export function estimateCell(unit, seen, { strong = false } = {}) {
  const [mean, ...interval] = estimated(unit, seen).split(" (");
  return element("span", { class: "estimate" }, [
    element(strong ? "b" : "span", { text: mean }),
    interval.length ? element("small", { text: interval.join(" (").slice(0, -1) }) : null,
  ]);
}

/** Runs of a kind that count. */
export function validRuns(report, arm, tokens) {
  return report.runs.filter((run) => run.arm === arm && !run.void.length && (arm === "alone" || run.prompt_tokens === tokens));
}

/** The mean of a measure over runs; null where none has it. */
export function meanOf(runs, name) {
  const known = runs.map((run) => run.measures[name]).filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

/** A section with a heading; `wide` where its table has many columns. */
export function section(title, children, { wide = false } = {}) {
  return element("section", { class: wide ? "card wide" : "card" }, [title === null ? null : element("h2", { text: title }), ...children]);
}

/** Names and values. */
export function factList(rows) {
  return element("dl", { class: "facts" }, rows.flatMap(([name, text]) => [element("dt", { text: name }), element("dd", { text })]));
}

/** A list of sentences under a word; nothing when there are none. */
export function told(word, lines) {
  if (!lines.length) return null;
  return element("div", { class: "told" }, [
    element("h3", { text: word }),
    element("ul", {}, lines.map((text) => element("li", { text }))),
  ]);
}

/** A bar from the low to the high end of an interval, on a scale that `largest` fills. */
export function intervalBar(seen, least, largest) {
  if (!seen || seen.low === null || seen.high === null || largest <= least) return element("span");
  const place = (value) => `${(100 * (value - least)) / (largest - least)}%`;
  const bar = element("span", { class: "bar" }, [element("i", { class: "zero" }), element("i", { class: "reach" }), element("i", { class: "middle" })]);
  bar.children[0].style.left = place(0);
  bar.children[1].style.left = place(seen.low);
  bar.children[1].style.width = `${(100 * (seen.high - seen.low)) / (largest - least)}%`;
  bar.children[2].style.left = place(seen.mean);
  return bar;
}

/** Means of each kind of run, a measure a row. */
export function meansTable(report, tokens, names) {
  const kinds = ARMS.map((arm) => validRuns(report, arm, tokens));
  const rows = names.flatMap((name) => {
    const means = kinds.map((runs) => meanOf(runs, name));
    if (means.every((value) => value === null)) return [];
    const { words, unit } = report.measures[name];
    return [[words, ...means.map((value) => figure(unit, value))]];
  });
  return table(["mean over valid runs", ...ARMS.map((arm, place) => `${arm} (${kinds[place].length})`)], rows, { numeric: [1, 2, 3] });
}
