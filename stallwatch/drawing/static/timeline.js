// The timeline of `/api/v1/timeline` and of reports: its figures as columns, and the panels that show them.

import { cause } from "./causes.js";
import { duration } from "./figures.js";

/** Figures beside figures, slot by slot; takes documents of the timeline that overlap. */
export class Figures {
  constructor(most) {
    this.most = most; // slots that are kept
    this.clear();
  }

  clear() {
    this.start = null; // unix seconds at which the first slot begins
    this.slot = 0.25;
    this.slots = 0;
    this.columns = new Map(); // "engines/0/running" -> numbers
  }

  /** The time at which the newest slot ends; null without any. */
  get end() {
    return this.start === null ? null : this.start + this.slots * this.slot;
  }

  /** Takes a document; what it knows is written over what was known. Says whether it follows what is there. */
  merge(found) {
    if (!found.slots) return true;
    if (this.start === null) {
      this.start = found.start_unix;
      this.slot = found.slot_seconds;
    }
    const ahead = (found.start_unix - this.start) / this.slot;
    const offset = Math.round(ahead);
    // A step of the clock, or a hole: whoever sees it asks for everything anew.
    if (Math.abs(ahead - offset) > 0.3 || offset < 0 || offset > this.slots) return false;
    this.#grow(offset + found.slots);
    for (const [group, content] of Object.entries({ engines: found.engines, gpus: found.gpus })) {
      for (const [member, figures] of Object.entries(content)) this.#write(`${group}/${member}/`, figures, offset);
    }
    this.#write("host/", found.host, offset);
    this.#write("sidecar/", found.sidecar, offset);
    this.#trim();
    return true;
  }

  /** Members of a group, in order: engines or GPUs. */
  members(group) {
    const found = new Set();
    for (const name of this.columns.keys()) if (name.startsWith(group + "/")) found.add(name.split("/")[1]);
    return [...found].sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
  }

  #grow(slots) {
    if (slots <= this.slots) return;
    for (const column of this.columns.values()) while (column.length < slots) column.push(null);
    this.slots = slots;
  }

  #write(prefix, figures, offset) {
    for (const [figure, numbers] of Object.entries(figures ?? {})) {
      const name = prefix + figure;
      let column = this.columns.get(name);
      if (!column) this.columns.set(name, (column = new Array(this.slots).fill(null)));
      for (let place = 0; place < numbers.length; place += 1) {
        if (numbers[place] !== null) column[offset + place] = numbers[place];
      }
    }
  }

  #trim() {
    const many = this.slots - this.most;
    if (many < 240) return; // not at every event
    for (const column of this.columns.values()) column.splice(0, many);
    this.start += many * this.slot;
    this.slots -= many;
  }
}

/** What the panels draw of one engine: the middle of each slot, and columns by the names that they use. */
export function drawn(figures, engine) {
  const times = Array.from({ length: figures.slots }, (_, place) => figures.start + (place + 0.5) * figures.slot);
  const columns = {};
  const take = (name, column) => {
    if (column) columns[name] = column;
  };
  const own = (figure) => figures.columns.get(`engines/${engine}/${figure}`);
  for (const figure of ENGINE_FIGURES) take(figure, own(figure));
  take("prefill_per_step", own("prefill_tokens_per_step") ?? perStep(own("prefill_tokens"), own("steps")));
  take("decode_per_step", perStep(own("generation_tokens"), own("steps")));
  take("waiting_any", own("waiting_capacity") ?? own("waiting"));
  const gpus = figures.members("gpus");
  for (const figure of GPU_FIGURES) {
    const all = gpus.map((gpu) => figures.columns.get(`gpus/${gpu}/${figure}`)).filter(Boolean);
    if (!all.length) continue;
    take(`gpu_${figure}_high`, extreme(all, Math.max));
    if (all.length > 1) take(`gpu_${figure}_low`, extreme(all, Math.min));
  }
  for (const figure of LINK_FIGURES) {
    const all = gpus.map((gpu) => figures.columns.get(`gpus/${gpu}/${figure}`)).filter(Boolean);
    if (all.length) take(`gpu_${figure}`, extreme(all, (...values) => values.reduce((sum, value) => sum + value)));
  }
  for (const [name, column] of figures.columns) if (/^(host|sidecar)\//.test(name)) take(name.replace("/", "_"), column);
  return { times, columns };
}

const ENGINE_FIGURES = [
  "gap_seconds", "open_gap_seconds", "first_token_seconds", "step_seconds", "step_age_seconds", "running",
  "waiting_deferred", "kv_usage", "prefill_backlog_tokens", "prompt_computed_tokens", "prompt_cached_tokens",
  "preemptions", "decoders",
];
const GPU_FIGURES = [
  "utilization", "memory_utilization", "dram_active", "sm_clock_hertz", "power_watts", "temperature_celsius",
  "memory_used_bytes",
];
const LINK_FIGURES = [
  "pcie_rx_bytes_per_second", "pcie_tx_bytes_per_second", "nvlink_rx_bytes_per_second", "nvlink_tx_bytes_per_second",
];
const LONGEST_STEP = 480; // slots
const TOLD_LATER = 2; // slots

/** What steps carried: their tokens over the steps that ended; a value stands for the whole time of its step. */
function perStep(tokens, steps) {
  if (!tokens || !steps) return null;
  const found = new Array(steps.length).fill(null);
  let carried = 0, since = 0, last = -Infinity;
  const put = (place) => {
    const value = carried / steps[place];
    for (let at = Math.max(since, place - LONGEST_STEP); at <= place; at += 1) found[at] = value;
  };
  for (let place = 0; place < steps.length; place += 1) {
    const more = tokens[place] ?? 0;
    if (steps[place]) {
      if (place - last > TOLD_LATER) carried = pending(tokens, last, place);
      else carried = 0;
      carried += more;
      if (last >= 0) since = last + 1;
      put(place);
      last = place;
    } else if (more && place - last <= TOLD_LATER) {
      // Another look at the server's page, right after the one that saw the step end, told what was in it.
      carried += more;
      put(last);
    }
  }
  return found;
}

/** Tokens that were told before a step ended and belong to none before. */
function pending(tokens, last, place) {
  let sum = 0;
  for (let at = Math.max(0, last + TOLD_LATER + 1, place - LONGEST_STEP); at < place; at += 1) sum += tokens[at] ?? 0;
  return sum;
}

function extreme(columns, choose) {
  return columns[0].map((_, place) => {
    const values = columns.map((column) => column[place]).filter((value) => value !== null);
    return values.length ? choose(...values) : null;
  });
}

/** The promises, in seconds, as lines of the first panel. */
export function promises({ itl_seconds: itl, ttft_seconds: ttft }) {
  return [{ at: itl, label: "promised between tokens" }, { at: ttft, label: "promised for the first" }];
}

/** The panels, the first without its promises. */
export function panels() {
  return [
    {
      title: "Readers wait", unit: "seconds", log: true, least: 0.001, most: 10, height: 132,
      series: [
        { column: "open_gap_seconds", label: "open gap", shade: 1, shape: "shadow", bridge: 1.1 },
        { column: "gap_seconds", label: "longest gap", shade: 1, bridge: 12 },
        { column: "first_token_seconds", label: "first token", shade: 2, shape: "dots", bridge: 30 },
      ],
      absent: "No canary stream yet: what a reader feels is not known.",
    },
    {
      title: "Engine steps", unit: "seconds", log: true, least: 0.001, most: 1, height: 96,
      series: [
        { column: "step_age_seconds", label: "no step for", shade: 3, shape: "shadow" },
        { column: "step_seconds", label: "step duration", shade: 1, bridge: 15 },
      ],
      absent: "No engine step was seen.",
    },
    {
      title: "Tokens in a step", unit: "tokens_per_step", most: 64,
      series: [
        { column: "prefill_per_step", label: "prefill", shade: 2, shape: "blocks" },
        { column: "decode_per_step", label: "decode", shade: 1, shape: "step" },
      ],
      absent: "What steps carried is not known.",
    },
    {
      title: "Requests", unit: "requests", most: 5,
      series: [
        { column: "running", label: "running", shade: 1, shape: "step" },
        { column: "waiting_any", label: "waiting", shade: 2, shape: "step" },
        { column: "waiting_deferred", label: "deferred", shade: 3, shape: "step", dash: [4, 3] },
      ],
      absent: "The server does not tell its requests.",
    },
    {
      title: "Prompt tokens", unit: "tokens", most: 100,
      series: [
        { column: "prefill_backlog_tokens", label: "backlog", shade: 3, shape: "area" },
        { column: "prompt_computed_tokens", label: "computed", shade: 2, shape: "bars" },
        { column: "prompt_cached_tokens", label: "cached", shade: 4, shape: "bars" },
      ],
      absent: "The server does not tell its prompts.",
    },
    {
      title: "KV cache and preemptions", unit: "ratio", most: 1, height: 72,
      series: [
        { column: "kv_usage", label: "KV cache in use", shade: 1, shape: "area" },
        { column: "preemptions", label: "preemptions", shade: 2, shape: "bars", unit: "count" },
      ],
      absent: "The server does not tell its KV cache.",
    },
    {
      group: "GPU", title: "GPU at work", unit: "ratio", most: 1,
      series: [
        { column: "gpu_utilization_high", label: "kernels run", shade: 1 },
        { column: "gpu_utilization_low", label: "slowest GPU", shade: 1, dash: [4, 3], optional: true },
        { column: "gpu_memory_utilization_high", label: "memory", shade: 2 },
        { column: "gpu_dram_active_high", label: "DRAM active", shade: 4, optional: true },
      ],
      absent: "No GPU is read here.",
    },
    {
      group: "GPU", title: "SM clock", unit: "hertz", most: 1e9, height: 72,
      series: [
        { column: "gpu_sm_clock_hertz_high", label: "fastest", shade: 1 },
        { column: "gpu_sm_clock_hertz_low", label: "slowest", shade: 1, dash: [4, 3], optional: true },
      ],
      absent: "No GPU clock is read here.",
    },
    {
      group: "GPU", title: "Power", unit: "watts", most: 100, height: 72,
      series: [
        { column: "gpu_power_watts_high", label: "highest", shade: 1 },
        { column: "gpu_power_watts_low", label: "lowest", shade: 1, dash: [4, 3], optional: true },
      ],
      absent: "No GPU power is read here.",
    },
    {
      group: "GPU", title: "Links of all GPUs", unit: "bytes_per_second", most: 1e6, height: 72,
      series: [
        { column: "gpu_pcie_rx_bytes_per_second", label: "PCIe in", shade: 1 },
        { column: "gpu_pcie_tx_bytes_per_second", label: "PCIe out", shade: 1, dash: [4, 3] },
        { column: "gpu_nvlink_rx_bytes_per_second", label: "NVLink in", shade: 4, optional: true },
        { column: "gpu_nvlink_tx_bytes_per_second", label: "NVLink out", shade: 4, dash: [4, 3], optional: true },
      ],
      absent: "The GPUs do not tell their links.",
    },
    {
      group: "Host and stallwatch", closed: true, title: "Host waits for", unit: "ratio", most: 0.1,
      series: [
        { column: "host_memory_full_ratio", label: "memory", shade: 2, bridge: 6 },
        { column: "host_io_full_ratio", label: "disk", shade: 4, bridge: 6 },
        { column: "host_cpu_some_ratio", label: "CPU", shade: 1, bridge: 6 },
        { column: "host_engine_throttled_ratio", label: "vLLM throttled", shade: 3, bridge: 6, optional: true },
      ],
      absent: "The host's pressure cannot be read here.",
    },
    {
      group: "Host and stallwatch", closed: true, title: "Our own lateness", unit: "seconds", log: true, least: 0.0001,
      most: 0.1, height: 72,
      series: [{ column: "sidecar_lag_seconds", label: "loop late by", shade: 1 }],
    },
  ];
}

/** Stalls of the API as spans of a stack. */
export function spans(stalls, engine) {
  return stalls.filter((stall) => stall.engine === engine).map((stall) => ({
    id: stall.id, start: stall.start_unix, end: stall.end_unix, cause: stall.cause, label: described(stall),
  }));
}

/** A stall in a few words. */
export function described(stall) {
  const long = stall.duration_seconds === undefined ? "" : `, ${duration(stall.duration_seconds)}`;
  return `${cause(stall.cause).name}${long}${stall.end_unix === null ? ", going on" : ""}`;
}
