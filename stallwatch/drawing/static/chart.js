// Charts one above another that share a time axis, a cursor and a zoom; drawn by uPlot (the global `uPlot`).
//
//   const stack = new Stack(root, { panels, axis: "clock", onRange, onSpan });
//       axis: "clock" and "utc" are times of day, "elapsed" is seconds since a beginning, "number" is any figure
//   stack.setData(times, columns);        // seconds; columns: name -> numbers, null where nothing is known
//   stack.setSpans([{ id, start, end, cause, label }]);      // shaded; end null: it goes on
//   stack.setRange(from, to);
//
// A panel is { title, unit, series: [{ column, label, shade, shape, dash, bridge }], log, most, least, height, lines,
// absent }:
//   unit     a unit of figures.js, for the axis and the readings
//   shade    1 to 4: --series-N of look.css
//   shape    "line" (default), "step" (holds until the next time), "area" (a line with a fill), "blocks" (filled steps),
//            "shadow" (a fill alone), "bars", "dots"
//   bridge   seconds over which a line goes on across unknown values (default 3): longer ones are a hole
//   log      logarithmic, from `least` to at least `most`; otherwise from 0 (or `least`) to at least `most`
//   lines    [{ at, label }]: horizontal lines, such as an objective
//   absent   what to say when none of its columns is there
//   group    panels of one group can be folded away; `closed`: they are at first
// A series with `unit` has another unit than the panel's axis, and is drawn to its own scale; `optional`: without its
// column it is not mentioned.
//
// Colours are read from the style sheet, so both themes work; call `repaint()` when they change.

import { element, say } from "./dom.js";
import { clock, coarse, figure, short } from "./figures.js";
import { cause } from "./causes.js";

const AXIS_WIDTH = 62;
const AXIS_WIDTH_NARROW = 48;
const RIGHT = 10;
const PANEL_HEIGHT = 92;
const TIME_AXIS = 24;
const NARROW_BELOW = 560;
const BRIDGE = 3;
const LEAST_RANGE = 2; // seconds
const PLAIN = ["tokens", "tokens_per_step", "tokens_per_second", "requests", "count"]; // the title says it
const FILLED = ["area", "blocks", "bars", "shadow"];

/** Colours of the theme that is on, by the names of the style sheet's variables. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const known = new Map();
  return (name) => {
    if (!known.has(name)) known.set(name, style.getPropertyValue("--" + name).trim());
    return known.get(name);
  };
}

export class Stack {
  constructor(root, { panels, axis = "clock", label = "Timeline", lane = true, onRange = () => {}, onSpan = () => {} }) {
    this.axis = axis;
    this.onRange = onRange;
    this.onSpan = onSpan;
    this.times = [];
    this.columns = {};
    this.spans = [];
    this.chosen = null; // id of a span
    this.range = [0, 1];
    this.colour = palette();
    this.hatches = new Map();
    this.groups = new Map(); // name -> the element that folds it away
    this.sync = "stack-" + Math.random().toString(36).slice(2);
    this.instant = element("span", { class: "instant" });
    this.lane = element("div", { class: "lane", hidden: !lane });
    this.root = root;
    root.classList.add("stack");
    root.tabIndex = 0;
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", label);
    root.append(this.instant, this.lane);
    this.panels = panels.map((panel, place) => new Panel(this, panel, place + 1 === panels.length || panels[place + 1].group !== panel.group));
    this.#place(root);
    root.addEventListener("keydown", (event) => this.#key(event));
    const sizes = new ResizeObserver(() => this.#resized());
    for (const panel of this.panels) sizes.observe(panel.holder);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
  }

  /** Takes new values; all columns are as long as `times`, which rise. */
  setData(times, columns) {
    this.times = times;
    this.columns = columns;
    for (const panel of this.panels) panel.take();
    this.#fold();
  }

  /** Takes what is shaded. */
  setSpans(spans) {
    this.spans = spans;
    this.#layLane();
    for (const panel of this.panels) panel.redraw();
  }

  /** Shows which span is looked at; null for none. */
  choose(id) {
    this.chosen = id;
    this.#layLane();
    for (const panel of this.panels) panel.redraw();
  }

  /** Shows the time from one moment to another. */
  setRange(from, to) {
    this.range = [from, to];
    for (const panel of this.panels) panel.rescale();
    this.#layLane();
  }

  /** Draws other horizontal lines into a panel. */
  setLines(place, lines) {
    this.panels[place].spec.lines = lines;
    this.panels[place].redraw();
  }

  /** Reads the colours anew. */
  repaint() {
    this.colour = palette();
    this.hatches.clear();
    for (const panel of this.panels) panel.redraw();
  }

  /** The time under the cursor, or null. */
  get cursor() {
    const plot = this.panels[0]?.plot;
    return plot && plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null;
  }

  /** Puts the cursor at a time; null takes it away. */
  setCursor(time) {
    for (const { plot } of this.panels) {
      if (plot) plot.setCursor(time === null ? { left: -10, top: -10 } : { left: plot.valToPos(time, "x"), top: 1 });
    }
  }

  /** Zooms by a factor around a time: above 1 is closer. */
  zoom(factor, around = (this.range[0] + this.range[1]) / 2) {
    const [from, to] = this.range;
    if ((to - from) / factor < LEAST_RANGE && factor > 1) return;
    this.onRange(around - (around - from) / factor, around + (to - around) / factor);
  }

  zoomed(from, to) {
    if (to - from >= LEAST_RANGE / 4) this.onRange(from, to);
  }

  moved() {
    const at = this.cursor;
    say(this.instant, at === null ? "" : this.#said(at));
  }

  hatch(context, colour) {
    if (!this.hatches.has(colour)) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 8;
      const brush = tile.getContext("2d");
      brush.strokeStyle = colour;
      brush.lineWidth = 2;
      for (const offset of [-8, 0, 8]) {
        brush.moveTo(offset, 8);
        brush.lineTo(offset + 8, 0);
      }
      brush.stroke();
      this.hatches.set(colour, context.createPattern(tile, "repeat"));
    }
    return this.hatches.get(colour);
  }

  /** Panels of a group that follow each other can be folded away together. */
  #place(root) {
    let group = null, holder = root;
    for (const { spec, root: panel } of this.panels) {
      if (spec.group !== group) {
        group = spec.group;
        holder = root;
        if (group !== undefined) {
          const touch = () => (details.dataset.touched = "yes");
          const details = element("details", { class: "group", open: !spec.closed }, [
            element("summary", { text: group, on: { click: touch } }),
          ]);
          this.groups.set(group, (holder = details));
          root.append(details);
        }
      }
      holder.append(panel);
    }
  }

  /** A group of which nothing is known is folded away, until somebody opens it or something is known. */
  #fold() {
    for (const [group, details] of this.groups) {
      if (details.dataset.touched) continue;
      const panels = this.panels.filter((panel) => panel.spec.group === group);
      const known = panels.some((panel) => panel.known);
      details.open = known && !panels[0].spec.closed;
      say(details.firstElementChild, known ? group : `${group}: nothing is read here`);
    }
  }

  #said(at) {
    if (ofDay(this.axis)) return clock(at, { tenths: true, utc: this.axis === "utc" });
    return this.axis === "elapsed" ? figure("seconds", at) : short(at);
  }

  #resized() {
    for (const panel of this.panels) panel.fit();
    this.#layLane();
  }

  #layLane() {
    if (this.lane.hidden) return;
    const [from, to] = this.range;
    const known = new Map([...this.lane.querySelectorAll("button")].map((button) => [button.dataset.span, button]));
    let shown = 0;
    for (const span of this.spans) {
      const start = Math.max(span.start, from), end = Math.min(span.end ?? this.#newest(), to);
      if (end < from || start > to) continue;
      shown += 1;
      const { hue, hatched } = cause(span.cause);
      let button = known.get(span.id);
      known.delete(span.id);
      if (!button) {
        button = element("button", { type: "button", on: { click: () => this.onSpan(span.id) } });
        button.dataset.span = span.id;
        this.lane.append(button);
      }
      button.className = `hue-${hue}` + (hatched ? " hatched" : "");
      button.title = span.label;
      button.setAttribute("aria-label", span.label);
      button.setAttribute("aria-pressed", String(span.id === this.chosen));
      button.style.left = `${((start - from) / (to - from)) * 100}%`;
      button.style.width = `${(Math.max(0, end - start) / (to - from)) * 100}%`;
    }
    for (const button of known.values()) button.remove();
    let none = this.lane.querySelector(".none");
    if (!none) this.lane.prepend((none = element("span", { class: "none" })));
    say(none, shown ? "" : "no stalls in this time");
  }

  #newest() {
    return this.times.length ? this.times[this.times.length - 1] : this.range[1];
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.root) return;
    const [from, to] = this.range;
    const step = (to - from) / (event.shiftKey ? 10 : 100);
    const at = this.cursor ?? (event.key === "ArrowLeft" ? to : from);
    const act = {
      ArrowLeft: () => this.setCursor(Math.max(from, at - step)),
      ArrowRight: () => this.setCursor(Math.min(to, at + step)),
      Home: () => this.setCursor(from),
      End: () => this.setCursor(to),
      "+": () => this.zoom(2, this.cursor ?? undefined),
      "=": () => this.zoom(2, this.cursor ?? undefined),
      "-": () => this.zoom(0.5, this.cursor ?? undefined),
      Enter: () => {
        const under = this.spans.find((span) => span.start <= at && at <= (span.end ?? Infinity));
        if (under) this.onSpan(under.id);
      },
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }
}

class Panel {
  constructor(stack, spec, last) {
    this.stack = stack;
    this.spec = spec;
    this.last = last;
    this.plot = null;
    this.readings = spec.series.map((series) => {
      const filled = FILLED.includes(series.shape);
      const shade = series.shade ?? 1;
      const look = (filled ? " filled" : "") + (series.dash ? " dashed" : "") + (series.shape === "shadow" ? " shadow" : "");
      const key = element("i", { class: "key" + look });
      key.style.setProperty("--series", `var(--series-${shade})`);
      key.style.setProperty("--fill", `var(--${series.shape === "bars" ? "series" : "fill"}-${shade})`);
      const value = element("b", { text: figure(spec.unit, null) });
      const reading = element("span", { class: "reading", hidden: series.optional }, [
        key,
        element("span", { text: series.label }),
        value,
      ]);
      return { value, root: reading };
    });
    this.absent = element("div", { class: "absent", text: "No data yet." });
    this.holder = element("div", { class: "plot" });
    this.holder.style.height = `${this.#height()}px`;
    this.root = element("section", { class: "panel", "aria-label": spec.title }, [
      element("div", { class: "panel-head" }, [
        element("h3", { text: spec.title }),
        ...this.readings.map((reading) => reading.root),
      ]),
      this.holder,
    ]);
    this.absent.style.bottom = this.last ? `${TIME_AXIS}px` : "0";
    this.holder.append(this.absent);
  }

  take() {
    this.known = this.spec.series.some((series) => this.stack.columns[series.column]);
    say(this.absent, this.known ? "" : (this.spec.absent ?? "No data yet."));
    const data = this.#data();
    if (this.plot) this.plot.setData(data, false);
    else this.#make(data);
    this.rescale();
    this.read();
  }

  rescale() {
    const [min, max] = this.stack.range;
    if (this.plot) this.plot.setScale("x", { min, max });
  }

  redraw() {
    if (this.plot) this.plot.redraw(false);
  }

  fit() {
    const width = this.holder.clientWidth;
    if (!width) return;
    if (!this.plot) return void (this.stack.times.length && this.#make(this.#data()));
    if (width !== this.plot.width) this.plot.setSize({ width, height: this.#height() });
  }

  /** Writes the values under the cursor into the head, or else the newest. */
  read() {
    const { times, columns, cursor } = this.stack;
    const under = cursor === null ? null : this.plot.cursor.idx;
    this.spec.series.forEach((series, place) => {
      const column = columns[series.column];
      let value = null;
      if (column && times.length) {
        const reach = series.bridge ?? BRIDGE;
        const at = under ?? times.length - 1;
        for (let index = at; index >= 0 && times[at] - times[index] <= reach; index -= 1) {
          if (column[index] !== null && column[index] !== undefined) {
            value = column[index];
            break;
          }
        }
      }
      if (series.optional) this.readings[place].root.hidden = !column;
      say(this.readings[place].value, figure(series.unit ?? this.spec.unit, value));
    });
  }

  #data() {
    const nothing = this.stack.times.map(() => null);
    return [this.stack.times, ...this.spec.series.map((series) => this.stack.columns[series.column] ?? nothing)];
  }

  #height() {
    return (this.spec.height ?? PANEL_HEIGHT) + (this.last ? TIME_AXIS : 0);
  }

  #make(data) {
    const width = this.holder.clientWidth;
    if (!width) return;
    const { stack, spec } = this;
    const axisWidth = () => (this.holder.clientWidth < NARROW_BELOW ? AXIS_WIDTH_NARROW : AXIS_WIDTH);
    const own = [...new Set(spec.series.map((series) => series.unit).filter(Boolean))];
    const lines = { stroke: () => stack.colour("grid"), width: 1 };
    this.plot = new uPlot(
      {
        width,
        height: this.#height(),
        padding: [6, RIGHT, this.last ? 0 : 4, 0],
        legend: { show: false },
        focus: { alpha: 1 },
        cursor: {
          y: false,
          sync: { key: stack.sync, setSeries: false, scales: ["x", null] },
          drag: { x: true, y: false, setScale: false, dist: 4 },
          points: { size: 6, width: 0, fill: (u, series) => stack.colour("series-" + (spec.series[series - 1].shade ?? 1)) },
          bind: { dblclick: () => () => stack.onRange(null, null) },
        },
        scales: {
          x: { time: ofDay(stack.axis), range: () => stack.range },
          y: spec.log
            ? { distr: 3, range: (u, min, max) => this.#decades(max) }
            : { range: (u, min, max) => this.#span(max) },
          ...Object.fromEntries(own.map((unit) => [unit, { range: (u, min, max) => [0, Math.max(1, max ?? 0) * 1.05] }])),
        },
        axes: [
          {
            size: this.last ? TIME_AXIS : 0,
            gap: 4,
            space: 70,
            stroke: () => stack.colour("soft"),
            font: "11px system-ui, sans-serif",
            grid: lines,
            ticks: { show: false },
            values: (u, splits, axis, space, step) => splits.map((split) => (this.last ? this.#time(split, step) : "")),
          },
          {
            size: axisWidth,
            gap: 6,
            space: 26,
            stroke: () => stack.colour("soft"),
            font: "11px system-ui, sans-serif",
            grid: lines,
            ticks: { show: false },
            splits: spec.log ? (u, axis, min, max) => powers(min, max) : undefined,
            filter: (u, splits) => splits,
            values: (u, splits) => splits.map((split) => (split === null ? null : this.#tick(split))),
          },
        ],
        series: [{}, ...spec.series.map((series) => this.#series(series))],
        hooks: {
          drawClear: [(u) => this.#shade(u)],
          draw: [(u) => this.#rule(u)],
          setSelect: [(u) => this.#selected(u)],
          setCursor: [() => (this.read(), stack.moved())],
          ready: [(u) => u.over.addEventListener("click", (event) => this.#clicked(u, event))],
        },
      },
      data,
      this.holder,
    );
  }

  #series({ shade = 1, shape = "line", dash = null, bridge = BRIDGE, unit = null }) {
    const { stack } = this;
    const colour = () => stack.colour("series-" + shade);
    const tint = () => stack.colour("fill-" + shade);
    const fills = { area: tint, blocks: tint, shadow: tint, bars: colour };
    const paths = {
      step: uPlot.paths.stepped({ align: 1 }),
      blocks: uPlot.paths.stepped({ align: 1 }),
      bars: uPlot.paths.bars({ size: [0.9, 24, 3] }),
      dots: () => null,
    };
    return {
      scale: unit === null ? "y" : unit,
      stroke: colour,
      fill: fills[shape],
      width: { bars: 0, shadow: 0, area: 1 }[shape] ?? 1.5,
      dash: dash ?? undefined,
      paths: paths[shape],
      points: { show: shape === "dots", size: 6, stroke: colour, fill: colour, width: 0 },
      // A line goes on over a short silence: how often a figure is read is not how often it is drawn.
      gaps: (u, series, first, last, holes) => {
        const [min, max] = stack.range;
        const wide = (bridge * u.bbox.width) / (max - min);
        return holes.filter(([from, to]) => to - from > wide);
      },
    };
  }

  #decades(max) {
    const least = this.spec.least ?? 0.001;
    return [least, Math.max(this.spec.most ?? 1, max === null ? 0 : 10 ** Math.ceil(Math.log10(max * 1.05)))];
  }

  #span(max) {
    const least = this.spec.least ?? 0;
    const most = this.spec.most ?? 0;
    return [least, max === null || max <= most ? most || 1 : rounded(max * 1.05)];
  }

  #tick(value) {
    const unit = this.spec.unit;
    if (unit === "seconds" && value >= 100) return `${value}\u202fs`; // a power of ten
    return PLAIN.includes(unit) ? compact(value) : figure(unit, value);
  }

  #time(split, step) {
    if (ofDay(this.stack.axis)) return clock(split, { seconds: step < 60, utc: this.stack.axis === "utc" });
    if (this.stack.axis !== "elapsed") return short(split);
    return step < 1 ? figure("seconds", split) : coarse(split);
  }

  #shade(u) {
    const { ctx, bbox } = u;
    for (const span of this.stack.spans) {
      const from = Math.max(u.valToPos(span.start, "x", true), bbox.left);
      const to = Math.min(span.end === null ? Infinity : u.valToPos(span.end, "x", true), bbox.left + bbox.width);
      if (to <= bbox.left || from >= bbox.left + bbox.width) continue;
      const { hue, hatched } = cause(span.cause);
      const colour = this.stack.colour("hue-" + hue);
      const wash = parseFloat(this.stack.colour("wash")) * (span.id === this.stack.chosen ? 1.5 : 1);
      ctx.save();
      ctx.globalAlpha = wash;
      ctx.fillStyle = colour;
      ctx.fillRect(from, bbox.top, Math.max(to - from, devicePixelRatio), bbox.height);
      if (hatched) {
        ctx.globalAlpha = wash * 1.5;
        ctx.fillStyle = this.stack.hatch(ctx, colour);
        ctx.fillRect(from, bbox.top, Math.max(to - from, devicePixelRatio), bbox.height);
      }
      ctx.restore();
    }
  }

  #rule(u) {
    const { ctx, bbox } = u;
    for (const { at, label } of this.spec.lines ?? []) {
      if (at === null || at === undefined) continue;
      const y = u.valToPos(at, "y", true);
      if (!(y >= bbox.top && y <= bbox.top + bbox.height)) continue;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = this.stack.colour("objective");
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
      ctx.textAlign = "left";
      ctx.textBaseline = "bottom";
      ctx.fillText(label, bbox.left + 6 * devicePixelRatio, y - 2 * devicePixelRatio);
      ctx.restore();
    }
  }

  #selected(u) {
    const { left, width } = u.select;
    if (width < 4) return;
    const from = u.posToVal(left, "x"), to = u.posToVal(left + width, "x");
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.stack.zoomed(from, to);
  }

  #clicked(u, event) {
    const at = u.posToVal(event.clientX - u.over.getBoundingClientRect().left, "x");
    const under = this.stack.spans.find((span) => span.start <= at && at <= (span.end ?? Infinity));
    if (under) this.stack.onSpan(under.id);
  }
}

function ofDay(axis) {
  return axis === "clock" || axis === "utc";
}

function compact(value) {
  return Math.abs(value) >= 10_000 ? short(value / 1000) + "k" : short(value);
}

/** The powers of ten of a logarithmic axis; every other one where there are many. */
function powers(min, max) {
  const found = [];
  for (let power = Math.round(Math.log10(min)); power <= Math.round(Math.log10(max)); power += 1) found.push(10 ** power);
  return found.length > 5 ? found.filter((_, place) => place % 2 === 0) : found;
}

/** The next of 1, 2, 3, 5 and 10 at or above: an axis that moves seldom. */
function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 3, 5, 10].find((step) => step * power >= value * 0.9999);
}
