// The report of an incident: what the bundle held, drawn as on the live page.

import { data, element, table } from "./dom.js";
import { UNKNOWN, coarse, duration, figure, moment } from "./figures.js";
import { Stack } from "./chart.js";
import { Figures, drawn, panels, promises, spans } from "./timeline.js";
import { causeLabel, stallDetail } from "./stall.js";

const found = data();
const main = document.getElementById("main");
const figures = new Figures(Infinity);
figures.merge(found.timeline);
const engines = Object.keys(found.timeline.engines);
const worst = [...found.stalls].sort((one, other) => other.stall_seconds - one.stall_seconds)[0];
let engine = worst?.engine ?? engines[0] ?? "0";

// --- the head

const server = found.server ?? {};
const gpus = [...new Set(found.gpus.map((gpu) => gpu.name ?? "GPU"))];
main.replaceChildren(
  element("header", {}, [
    element("p", { class: "soft", text: "stallwatch" }),
    element("h1", { text: found.incident ? `Incident of ${found.began}` : `Recording of ${found.began}` }),
    element("p", { class: "soft", text: [
      server.model ?? "model unknown",
      server.version ? `vLLM ${server.version}` : "version unknown",
      gpus.length ? `${found.gpus.length} × ${gpus.join(", ")}, driver ${found.driver ?? "unknown"}` : "no GPU was read",
      `${coarse(found.ended_unix - found.began_unix)} recorded`,
    ].join(" · ") }),
  ]),
  verdicts(),
);

function verdicts() {
  if (!found.stalls.length) return element("section", { class: "card" }, [element("p", { class: "lead", text: "No stalls." })]);
  return element("section", { class: "card" }, [
    element("ol", { class: "verdicts" }, found.stalls.map((stall) =>
      element("li", {}, [
        element("button", { type: "button", on: { click: () => show(stall.id, { zoom: true }) } }, [
          causeLabel(stall.cause),
          element("span", { text: stall.sentence }),
          element("span", { class: "faint", text: moment(stall.start_unix).slice(11, 19) }),
        ]),
      ]),
    )),
    ...found.differs.map((text) => element("p", { class: "soft", text })),
  ]);
}

// --- the timeline

const place = element("div");
const choice = element("select", { "aria-label": "Engine", on: { change: () => ((engine = choice.value), draw()) } },
  engines.map((name) => element("option", { value: name, text: `engine ${name}`, selected: name === engine })));
choice.hidden = engines.length < 2;
const whole = element("button", { type: "button", text: "Whole time", "aria-pressed": "true", on: { click: () => zoom(null) } });
main.append(element("section", { class: "card" }, [
  element("div", { class: "controls" }, [element("h2", { text: "Timeline (UTC)" }), choice, whole]),
  place,
]));
const stack = new Stack(place, {
  panels: panels(), axis: "utc", label: "Timeline of the incident", onRange: zoom, onSpan: (id) => show(id),
});

stack.setLines(0, promises(found.objectives));

function draw() {
  const { times, columns } = drawn(figures, engine);
  stack.range = [figures.start ?? 0, figures.end ?? 1];
  stack.setData(times, columns);
  stack.setSpans(spans(found.stalls, engine));
}

function zoom(from, to) {
  const all = [figures.start ?? 0, figures.end ?? 1];
  whole.setAttribute("aria-pressed", String(from === null));
  stack.setRange(...(from === null ? all : [Math.max(from, all[0] - 1), Math.min(to, all[1] + 1)]));
}

// --- the stalls, one by one

const cards = new Map(found.stalls.map((stall) => [stall.id, element("section", { class: "card" }, [stallDetail(stall, { utc: true })])]));
main.append(element("div", { class: "stalls" }, [...cards.values()]));

function show(id, { zoom: closer = false } = {}) {
  const stall = found.stalls.find((one) => one.id === id);
  if (stall.engine !== engine) {
    engine = choice.value = stall.engine;
    draw();
  }
  stack.choose(id);
  if (closer) {
    const end = stall.end_unix ?? figures.end;
    const margin = Math.max(5, (end - stall.start_unix) / 3);
    zoom(stall.start_unix - margin, end + margin);
    place.scrollIntoView({ block: "nearest" });
  } else {
    cards.get(id).scrollIntoView({ block: "nearest" });
  }
  for (const [other, card] of cards) card.classList.toggle("chosen", other === id);
}

// --- figures

for (const [name, rows] of Object.entries(found.compared)) {
  const cells = (row, when) => [row[when].typical, row[when].most].map((value) => figure(row.unit, value));
  main.append(element("section", { class: "card" }, [
    element("h2", { text: `Quiet and stalled${engines.length > 1 ? ` on engine ${name}` : ""}` }),
    table(["", "quiet: typical", "most", "stalled: typical", "most"], rows.map((row) => [
      row.figure + (row.summed ? " (sum)" : ""), ...cells(row, "quiet"), ...cells(row, "stalled"),
    ]), { numeric: [1, 2, 3, 4] }),
  ]));
}

main.append(element("section", { class: "card" }, [
  element("h2", { text: "Inter-token latency in the 5 min before the end" }),
  table(["engine", "", "by tokens", "by time", "all readers", "missed / judged"], Object.entries(found.status.engines).flatMap(([name, seen]) => {
    const window = seen.canary?.windows[0];
    return [["0.5", "p50"], ["0.95", "p95"], ["0.99", "p99"]].map(([q, word], row) => [
      row ? "" : name, word,
      duration(window?.itl_seconds[q] ?? null), duration(window?.time_weighted_seconds[q] ?? null), duration(seen.readers?.itl_seconds[q] ?? null),
      row ? "" : `${duration(seen.slo.missed_seconds)} / ${duration(seen.slo.judged_seconds)}`,
    ]);
  }), { numeric: [2, 3, 4, 5] }),
  ...Object.entries(found.advice).map(([name, said]) => element("p", { class: "advice" }, [
    element("span", { class: "soft", text: `Token budget${engines.length > 1 ? ` of engine ${name}` : ""}: ` }),
    element("span", { text: `${said.sentence} ${said.holds_for}` }),
  ])),
]));

const settings = Object.entries(found.settings).flatMap(([room, values]) =>
  Object.entries(values).map(([name, value]) => [`${room}.${name}`, value === null ? UNKNOWN : String(value)]));
main.append(
  element("details", { class: "card" }, [
    element("summary", { text: "What was recorded, and by which settings" }),
    element("dl", { class: "facts" }, [
      ["File", found.file],
      ["Observations", `${figure("count", found.observations)}${found.lost ? `, ${found.lost} lost` : ""}${found.torn ? ", its end is missing" : ""}`],
      ["Written by", `stallwatch ${found.written_by}`],
      ["Reported by", `stallwatch ${found.made_by}`],
      ...Object.entries(server.caches ?? {}).map(([name, cache]) => [
        `KV cache of engine ${name}`, `${cache.num_gpu_blocks ?? UNKNOWN} blocks of ${cache.block_size ?? UNKNOWN} tokens`,
      ]),
      ...Object.entries(found.changed).map(([name, [before, after]]) => [name, `${after} instead of ${before}`]),
    ].flatMap(([name, text]) => [element("dt", { text: name }), element("dd", { text })])),
    table(["setting", "value"], settings),
  ]),
);

draw();
if (worst) stack.choose(worst.id);
