// The live page: what comes every second goes into the verdict, the cards, the timeline and the list of stalls.

import { element, say } from "./dom.js";
import { cause } from "./causes.js";
import { clock, duration } from "./figures.js";
import { Stack } from "./chart.js";
import { Figures, drawn, panels, promises, spans } from "./timeline.js";
import { causeLabel, stallDetail } from "./stall.js";
import { NOTHING, showCards } from "./cards.js";
import { feed } from "./feed.js";

const $ = (id) => document.getElementById(id);
const KEPT_SLOTS = 3600; // 15 minutes
const KEPT_STALLS = 100;
const FADING = ["verdict", "latency", "now", "prefill", "advice", "holds", "canary", "sources"];
const SHORTEST = 60; // seconds that are shown at least

const figures = new Figures(KEPT_SLOTS);
const stalls = new Map(); // by id
const shown = {
  engine: null,
  chosen: false, // by hand: else it is the one whose readers wait, or the first
  seconds: 300, // while live
  range: null, // [from, to] when zoomed
  stall: null, // id
};
let last = null; // event
const stack = new Stack($("timeline"), {
  panels: panels(), label: "Timeline of the last minutes", onRange: zoom, onSpan: open,
});
showCards(NOTHING, null);

// --- from the server

const restart = feed({
  begin({ timeline, stalls: known }) {
    figures.clear();
    stalls.clear();
    figures.merge(timeline);
    keep(known);
    if (!stalls.has(shown.stall)) shown.stall = null;
    chooseEngine();
    draw();
  },
  event(content) {
    last = content;
    if (!figures.merge(content.timeline)) return restart();
    keep(content.stalls);
    chooseEngine();
    stack.setLines(0, promises(content.objectives));
    tellVerdict(content.verdict);
    tellTarget(content.status);
    showCards(content, shown.engine);
    draw();
    tellStalls();
  },
  state(word) {
    $("connection").dataset.state = word;
    const since = last === null ? "" : ` since ${clock(last.at_unix)}`;
    say($("connection").lastElementChild, word === "lost" ? `no connection${since}` : word);
    for (const id of FADING) $(id).classList.toggle("stale", word === "lost");
  },
});

function keep(found) {
  for (const stall of found) stalls.set(stall.id, stall);
  const oldest = [...stalls.values()].sort((one, other) => other.start_unix - one.start_unix).slice(KEPT_STALLS);
  for (const stall of oldest) stalls.delete(stall.id);
}

function chooseEngine() {
  const known = last ? Object.keys(last.status.engines) : figures.members("engines");
  known.sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
  const select = $("engine");
  if (select.children.length !== known.length || known.some((name, place) => select.children[place].value !== name)) {
    select.replaceChildren(...known.map((name) => element("option", { value: name, text: name })));
    $("engine-choice").hidden = known.length < 2;
  }
  const waiting = stalls.get(last?.verdict.stall)?.engine;
  if (!shown.chosen && waiting !== undefined) shown.engine = waiting;
  if (shown.engine === null || !known.includes(shown.engine)) shown.engine = known[0] ?? null;
  if (select.value !== shown.engine && shown.engine !== null) select.value = shown.engine;
}

// --- what is said

let announced = "";

function tellVerdict({ state, sentence, more, stall, cause: word }) {
  const { hue, hatched } = cause(word);
  const box = $("verdict");
  const look = "verdict card" + (state === "stalled" ? ` hue-${hue}${hatched ? " hatched" : ""}` : "");
  if (box.className !== look) box.className = look;
  box.dataset.state = state;
  say($("sentence"), sentence);
  say($("more"), more);
  $("evidence").hidden = stall === null;
  document.title = { stalled: "● stalled", down: "○ down" }[state] ?? "stallwatch";
  if (stall !== null) $("evidence").dataset.stall = stall;
  // Numbers change every second: only a turn is read aloud.
  const turn = [state, stall, word].join();
  if (turn !== announced) say($("announcement"), sentence);
  announced = turn;
}

function tellTarget({ stallwatch, target, gpu }) {
  const parts = [target.model ?? "model unknown", target.version ? `vLLM ${target.version}` : "version unknown", target.phase];
  const names = new Set(gpu.gpus.map((one) => one.name ?? "GPU"));
  if (gpu.gpus.length) parts.push(`${gpu.gpus.length} × ${[...names].join(", ")}`);
  say($("target"), parts.join(" · "));
  $("target").title = target.url;
  say($("version"), `stallwatch ${stallwatch}`);
}

function tellStalls() {
  const list = $("stalls");
  const order = [...stalls.values()].sort((one, other) => other.start_unix - one.start_unix);
  say($("count"), order.length ? String(order.length) : "");
  if (!order.length) {
    if (!list.querySelector(".none")) list.replaceChildren(element("li", { class: "none faint", text: "none seen" }));
    return;
  }
  list.querySelector(".none")?.remove();
  order.forEach((stall, place) => {
    let item = list.children[place];
    if (!item || item.dataset.stall !== stall.id || item.dataset.cause !== stall.cause) {
      const made = element("li", {}, [
        element("button", { type: "button", on: { click: () => open(stall.id) } }, [
          element("span", { class: "soft" }),
          causeLabel(stall.cause),
          element("span"),
        ]),
      ]);
      made.dataset.stall = stall.id;
      made.dataset.cause = stall.cause;
      if (item && item.dataset.stall === stall.id) item.replaceWith(made);
      else list.insertBefore(made, item ?? null);
      item = made;
    }
    const button = item.firstElementChild;
    button.classList.toggle("open", stall.open);
    button.setAttribute("aria-pressed", String(stall.id === shown.stall));
    say(button.children[0], clock(stall.start_unix));
    say(button.children[2], duration(stall.duration_seconds) + (stall.open ? " …" : ""));
  });
  while (list.children.length > order.length) list.lastElementChild.remove();
  tellDetail(order[0]);
}

let detailed = "";

/** The stall that was chosen, or the newest where there is room for it. */
function tellDetail(newest) {
  const stall = stalls.get(shown.stall) ?? newest;
  $("detail").classList.toggle("newest", !stalls.has(shown.stall));
  $("detail").classList.remove("hint");
  const state = JSON.stringify(stall);
  if (state === detailed) return;
  detailed = state;
  $("stall").replaceChildren(stallDetail(stall));
}

function open(id, { focus = false } = {}) {
  shown.stall = id;
  const stall = stalls.get(id);
  if (stall) {
    if (stall.engine !== shown.engine) look(stall.engine);
    const [from, to] = range();
    const end = stall.end_unix ?? figures.end;
    if (stall.start_unix < from || end > to) {
      const margin = Math.max(5, (end - stall.start_unix) / 2);
      zoom(stall.start_unix - margin, end + margin);
    }
    stack.choose(id);
  }
  tellStalls();
  if (focus) $("detail").focus({ preventScroll: true });
}

function close() {
  shown.stall = null;
  stack.choose(null);
  tellStalls();
}

// --- the timeline

function range() {
  if (shown.range) return shown.range;
  const end = figures.end ?? 0;
  // While there is less than was asked for, what there is may have the room.
  return [Math.max(end - shown.seconds, Math.min(figures.start ?? 0, end - SHORTEST)), end];
}

function draw() {
  if (figures.start === null) return;
  const { times, columns } = drawn(figures, shown.engine);
  stack.range = range();
  stack.setData(times, columns);
  stack.setSpans(spans([...stalls.values()], shown.engine));
}

function zoom(from, to) {
  if (from === null || figures.start === null) return follow(shown.seconds);
  shown.range = [Math.max(from, figures.start - 1), Math.min(to, figures.end + 1)];
  buttons();
  stack.setRange(...shown.range);
}

function follow(seconds) {
  shown.seconds = seconds;
  shown.range = null;
  buttons();
  stack.setRange(...range());
}

function buttons() {
  $("live").setAttribute("aria-pressed", String(shown.range === null));
  for (const button of $("windows").children) {
    button.setAttribute("aria-pressed", String(shown.range === null && Number(button.dataset.seconds) === shown.seconds));
  }
}

function look(engine) {
  shown.engine = $("engine").value = engine;
  shown.chosen = true;
  if (last) showCards(last, engine);
  draw();
}

function neighbour(step) {
  const order = [...stalls.values()].sort((one, other) => one.start_unix - other.start_unix).map((stall) => stall.id);
  if (!order.length) return;
  const place = order.indexOf(shown.stall);
  open(order[place < 0 ? order.length - 1 : Math.min(order.length - 1, Math.max(0, place + step))]);
}

// --- hands

$("windows").addEventListener("click", (event) => {
  if (event.target.dataset.seconds) follow(Number(event.target.dataset.seconds));
});
$("live").addEventListener("click", () => follow(shown.seconds));
$("closer").addEventListener("click", () => stack.zoom(2, shown.range ? undefined : range()[1]));
$("wider").addEventListener("click", () => stack.zoom(0.5, shown.range ? undefined : range()[1]));
$("help").addEventListener("click", () => $("keys").showModal());
$("evidence").addEventListener("click", (event) => open(event.currentTarget.dataset.stall, { focus: true }));
$("close").addEventListener("click", close);
$("engine").addEventListener("change", (event) => look(event.target.value));
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|INPUT)$/.test(event.target.tagName)) return;
  const act = {
    1: () => follow(60),
    2: () => follow(300),
    3: () => follow(900),
    0: () => follow(shown.seconds),
    l: () => follow(shown.seconds),
    "[": () => neighbour(-1),
    "]": () => neighbour(1),
    "?": () => $("keys").showModal(),
    Escape: close,
  }[event.key];
  if (act) act();
});
