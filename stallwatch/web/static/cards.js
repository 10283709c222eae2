// The figures above the timeline. A dash is for what is not known; nothing is 0 that was not counted.

import { element, say } from "./dom.js";
import { UNKNOWN, coarse, duration, figure } from "./figures.js";

const $ = (id) => document.getElementById(id);

/** What there is before the first event. */
export const NOTHING = {
  status: {
    engines: {}, sources: {}, gpu: {}, observer: { lag_seconds: null },
    canary: { enabled: true, mode: UNKNOWN, requests: {}, skipped: {}, last_success_seconds_ago: null },
  },
  objectives: { itl_seconds: null },
  advice: {},
};

/** Writes the status of one engine into the cards. */
export function showCards(content, engine) {
  const { status, objectives, advice } = content;
  const seen = status.engines[engine] ?? null;
  latency(seen, objectives);
  facts($("now"), nowOf(seen, objectives));
  facts($("prefill"), prefillOf(seen));
  facts($("canary"), canaryOf(status, seen));
  sources(status);
  const advised = advice[engine];
  say($("advice"), advised ? advised.sentence : "No data yet.");
  say($("holds"), advised ? advised.holds_for : "");
}

/** A list of names and values whose rows stay where they are. */
function facts(list, rows) {
  rows.forEach(([name, value, title], place) => {
    let term = list.children[2 * place];
    if (!term) list.append((term = element("dt")), element("dd"));
    const content = list.children[2 * place + 1];
    say(term, name);
    say(content, value);
    content.title = title ?? "";
  });
  while (list.children.length > 2 * rows.length) list.lastChild.remove();
}

function latency(seen, objectives) {
  const body = $("latency");
  const window = seen?.canary?.windows[0] ?? null;
  const readers = seen?.readers ?? null;
  for (const [place, [q, name]] of [["0.5", "p50"], ["0.95", "p95"], ["0.99", "p99"]].entries()) {
    let row = body.children[place];
    if (!row) {
      row = element("tr", {}, [element("td"), ...[0, 1, 2].map(() => element("td", { class: "number" }))]);
      body.append(row);
    }
    const values = [window?.itl_seconds[q], window?.time_weighted_seconds[q], readers?.itl_seconds[q]];
    say(row.children[0], name);
    values.forEach((value, column) => say(row.children[column + 1], duration(value ?? null)));
  }
  say($("window"), window || readers ? `last ${coarse((window ?? readers).seconds)}` : "");
  const counts = [];
  if (window) counts.push(`${figure("count", window.tokens)} canary tokens`);
  if (readers) counts.push(`${figure("count", readers.tokens)} of readers`);
  say($("samples"), counts.length ? `${counts.join(", ")}; promised ${duration(objectives.itl_seconds)}` : "no tokens seen yet");
}

function nowOf(seen, objectives) {
  const requests = seen?.requests ?? {};
  const recent = seen?.slo.of_last_5_minutes ?? null;
  const waiting = (requests.waiting_capacity ?? 0) + (requests.waiting_deferred ?? 0);
  const missed = recent && recent.judged_seconds > 0
    ? `${coarse(recent.missed_seconds)}, ${Math.round((100 * recent.missed_seconds) / recent.judged_seconds)} %`
    : UNKNOWN;
  return [
    ["Open gap", duration(seen?.canary?.open_gap_seconds ?? null), "since the last token of the canary's open stream"],
    ["No step for", duration(seen?.step_age_seconds ?? null), "time for which no engine step was seen to end"],
    ["Running", figure("requests", requests.running ?? null), "requests, the canary's taken out"],
    ["Waiting", "running" in requests ? figure("requests", waiting) : UNKNOWN],
    ["Missed", missed, `of the last 5 min: time in which readers waited longer than ${duration(objectives.itl_seconds)} for a token`],
  ];
}

function prefillOf(seen) {
  const steps = seen?.steps ?? null;
  const per = steps?.prefill_tokens_per_step;
  const backlog = steps?.backlog;
  return [
    ["Tokens a step", figure("count", per?.mean ?? null), "prompt tokens in a step, mean of the last 15 s"],
    ["At most", figure("count", per?.max ?? null), "prompt tokens in the fullest step of the last 15 s"],
    ["To go", figure("count", backlog?.tokens ?? null), "prompt tokens admitted and not computed yet"],
    ["Done in", backlog?.tokens === 0 ? UNKNOWN : duration(backlog?.eta_seconds ?? null), "at the pace seen"],
    ["Interference", slower(steps?.interference.ratio.mean ?? null), "how much longer than usual steps took because of prefill, over 5 min"],
    ["Evidence", steps?.evidence ?? UNKNOWN, "plugin and mfu are exact, balance is an estimate"],
  ];
}

function slower(ratio) {
  return ratio === null ? UNKNOWN : `+${figure("ratio", ratio)}`;
}

function canaryOf(status, seen) {
  const canary = status.canary;
  if (!canary.enabled) return [["State", "off"], ["", ""], ["", ""], ["", ""], ["", ""]];
  const streams = seen?.canary?.streams ?? { decoding: 0, waiting: 0 };
  const asleep = Object.entries(canary.skipped).map(([reason, count]) => `${words(reason)} ${count}`);
  const failed = Object.entries(canary.requests).filter(([outcome]) => !["completed", "rotated", "cancelled"].includes(outcome));
  const done = (canary.requests.completed ?? 0) + (canary.requests.rotated ?? 0);
  const source = status.sources.canary;
  let now = "no stream now";
  if (streams.decoding) now = "reading";
  else if (streams.waiting) now = "waits for a token";
  else if (!source) now = "not sent yet";
  else if (!source.up) now = `fails: ${words(source.reason ?? "down")}`;
  return [
    ["State", now, source?.detail ?? ""],
    ["Mode", canary.mode],
    ["Done", done ? `${done}, ${coarse(canary.last_success_seconds_ago)} ago` : "none yet", "streams that ended as they should"],
    ["Failed", failed.length ? failed.map(([outcome, count]) => `${words(outcome)} ${count}`).join(", ") : "none"],
    ["Skipped", asleep.length ? asleep.join(", ") : "none"],
  ];
}

function words(name) {
  return name.replaceAll("_", " ");
}

function sources(status) {
  const rows = ["engine", "canary", "gpu", "host"].map((name) => {
    const state = status.sources[name];
    if (name === "gpu" && status.gpu.off) return [name, "off", "off", status.gpu.off];
    if (name === "canary" && !status.canary.enabled) return [name, "off", "off", ""];
    if (!state) return [name, "off", "no data yet", ""];
    if (state.up) return [name, "up", `up ${coarse(state.since_seconds)}`, ""];
    return [name, "down", `${state.reason ?? "down"} ${coarse(state.since_seconds)}`, state.detail ?? ""];
  });
  const lag = status.observer.lag_seconds;
  rows.push(["stallwatch", lag !== null && lag > 0.1 ? "down" : "up", `late ${duration(lag)}`, "how late our own loop ran in the last 30 s"]);
  const list = document.getElementById("sources");
  rows.forEach(([name, state, text, title], place) => {
    let item = list.children[place];
    if (!item) list.append((item = element("li", {}, [element("i"), element("span"), element("span")])));
    item.className = state;
    item.title = title;
    say(item.children[1], name === "gpu" ? "GPU" : name);
    say(item.children[2], text);
  });
}
