// What is known of one stall, with all the evidence, also that which lost.

import { element } from "./dom.js";
import { cause, kind } from "./causes.js";
import { UNKNOWN, clock, duration, figure } from "./figures.js";

/** A cause with its colour. */
export function causeLabel(word, properties = {}) {
  const { name, hue, hatched } = cause(word);
  return element("span", { class: `cause hue-${hue}${hatched ? " hatched" : ""}`, ...properties }, [
    element("i", { class: "swatch" }),
    element("span", { text: name }),
  ]);
}

/** Everything about a stall, as `/api/v1/stalls/{id}` tells it. */
export function stallDetail(stall, { utc = false } = {}) {
  const lines = [
    ["When", `${clock(stall.start_unix, { utc })} to ${stall.open ? "now" : clock(stall.end_unix, { utc })}${utc ? " UTC" : ""}`],
    ["Lasted", duration(stall.duration_seconds) + (stall.open ? ", going on" : "")],
    ["Beyond the usual", duration(stall.stall_seconds)],
    ["Longest gap", duration(stall.longest_gap_seconds)],
    ["Readers lost", stall.reader_seconds_lost === null ? UNKNOWN : `${figure("count", stall.reader_seconds_lost)} reader-seconds`],
    ["Seen as", kind(stall.kind)],
    ["Engine", stall.engine],
  ];
  if (stall.largest_prompt_tokens !== null) lines.push(["Largest prompt", figure("tokens", stall.largest_prompt_tokens)]);
  for (const note of stall.notes) lines.push(["Note", note]);
  return element("article", { class: "stall" }, [
    element("h3", {}, [causeLabel(stall.cause)]),
    element("dl", {}, lines.flatMap(([name, text]) => [element("dt", { text: name }), element("dd", { text })])),
    element("h2", { text: "Evidence" }),
    evidence(stall),
    element("p", { class: "try" }, [
      element("span", { class: "soft", text: "Try: " }),
      element("span", { text: stall.what_to_try }),
      element("span", { class: "faint", text: ` (${stall.runbook})` }),
    ]),
  ]);
}

function evidence(stall) {
  if (!stall.evidence.length) {
    return element("p", { class: "soft", text: stall.open ? "None yet: it comes when a step ends." : "None: nothing that was seen explains it." });
  }
  const most = Math.max(stall.stall_seconds, ...stall.evidence.map((one) => one.explains_seconds), 0.001);
  return element("ul", { class: "evidence" }, stall.evidence.map((one) => {
    const { hue } = cause(one.cause);
    const bar = element("i");
    bar.style.width = `${(100 * one.explains_seconds) / most}%`;
    return element("li", { class: `hue-${hue}` }, [
      causeLabel(one.cause),
      element("span", { class: "soft", text: ` explains ${duration(one.explains_seconds)} of ${duration(stall.stall_seconds)}` }),
      element("div", { class: "bar" }, [bar]),
      element("span", { text: one.what }),
    ]);
  }));
}
