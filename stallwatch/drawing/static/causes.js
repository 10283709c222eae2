// The causes of stalls as people see them. Seven hues that colour-blind people can tell apart; where two causes share
// one, the second is hatched; and the name stands beside the colour wherever there is room for it.

const CAUSES = {
  prefill: ["prefill", "vermilion", false],
  preemption: ["preemption", "vermilion", true],
  admission: ["admission", "blue", false],
  kv_transfer: ["KV transfer", "blue", true],
  gpu_clock: ["GPU clock", "gold", false],
  gpu_idle: ["GPU idle", "gold", true],
  interconnect: ["interconnect", "green", false],
  host_pressure: ["host pressure", "green", true],
  engine_down: ["engine down", "purple", false],
  engine_hang: ["engine hang", "purple", true],
  delivery: ["delivery", "sky", false],
  observer: ["observer", "grey", true],
  unknown: ["cause unknown", "grey", false],
};

const KINDS = {
  decode: "a stream that had tokens stopped",
  engine: "no engine step ended",
  admission: "a first token was late",
  degraded: "far fewer tokens than usual",
};

/** What is shown of a cause: its name, hue (of `look.css`: --hue-NAME) and whether it is hatched. */
export function cause(word) {
  const [name, hue, hatched] = CAUSES[word] ?? [String(word), "grey", false];
  return { name, hue, hatched };
}

/** What a kind of stall means. */
export function kind(word) {
  return KINDS[word] ?? String(word);
}

/** All causes by their words, in the order of the legend. */
export const CAUSE_WORDS = Object.keys(CAUSES);
