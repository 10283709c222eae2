// Numbers for people: three figures and a unit, and a dash for what is not known.

export const UNKNOWN = "–";

const NARROW = "\u202f";
const COUNT = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Three significant figures without an exponent. */
export function short(value) {
  const size = Math.abs(value);
  if (size >= 99.95) return COUNT.format(value);
  if (size >= 9.995) return trimmed(value.toFixed(1));
  return trimmed(value.toFixed(2));
}

function trimmed(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function scaled(value, steps) {
  for (const [least, unit] of steps) if (Math.abs(value) >= least) return short(value / least) + NARROW + unit;
  const [last, unit] = steps[steps.length - 1];
  return short(value / last) + NARROW + unit;
}

const BYTES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
const HERTZ = [[1e9, "GHz"], [1e6, "MHz"], [1, "Hz"]];

const UNITS = {
  seconds: (value) => duration(value),
  tokens: (value) => short(value) + NARROW + "tokens",
  tokens_per_step: (value) => short(value) + NARROW + "tok/step",
  tokens_per_second: (value) => short(value) + NARROW + "tok/s",
  requests: (value) => short(value),
  count: (value) => short(value),
  ratio: (value) => short(value * 100) + NARROW + "%",
  factor: (value) => short(value) + NARROW + "×",
  bytes: (value) => scaled(value, BYTES),
  bytes_per_second: (value) => scaled(value, BYTES) + "/s",
  hertz: (value) => scaled(value, HERTZ),
  watts: (value) => short(value) + NARROW + "W",
  celsius: (value) => short(value) + NARROW + "°C",
};

/** A value of a unit as text; a dash when it is not known. */
export function figure(unit, value) {
  return value === null || value === undefined || Number.isNaN(value) ? UNKNOWN : UNITS[unit](value);
}

/** Seconds: 9.4 ms, 131 ms, 1.33 s, 2 min 05 s. */
export function duration(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return UNKNOWN;
  if (value === 0) return "0" + NARROW + "s";
  if (Math.abs(value) < 0.9995) {
    const ms = value * 1000;
    return (Math.abs(ms) < 99.95 ? trimmed(ms.toFixed(Math.abs(ms) < 0.995 ? 2 : 1)) : ms.toFixed(0)) + NARROW + "ms";
  }
  if (Math.abs(value) < 9.995) return value.toFixed(2) + NARROW + "s";
  if (Math.abs(value) < 119.5) return value.toFixed(Math.abs(value) < 99.95 ? 1 : 0) + NARROW + "s";
  return coarse(value);
}

/** Seconds without their fractions: 45 s, 2 min 05 s, 3 h 12 min. */
export function coarse(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const whole = Math.max(0, Math.round(value));
  if (whole < 120) return whole + NARROW + "s";
  if (whole < 7200) {
    const minutes = Math.floor(whole / 60) + NARROW + "min";
    return whole % 60 ? minutes + " " + pad(whole % 60) + NARROW + "s" : minutes;
  }
  return Math.floor(whole / 3600) + NARROW + "h " + pad(Math.floor((whole % 3600) / 60)) + NARROW + "min";
}

function pad(number, width = 2) {
  return String(number).padStart(width, "0");
}

/** Time of day on this machine's clock, of unix seconds; with tenths when asked. */
export function clock(unix, { tenths = false, seconds = true, utc = false } = {}) {
  const at = new Date(unix * 1000);
  const [h, m, s] = utc
    ? [at.getUTCHours(), at.getUTCMinutes(), at.getUTCSeconds()]
    : [at.getHours(), at.getMinutes(), at.getSeconds()];
  const text = pad(h) + ":" + pad(m) + (seconds ? ":" + pad(s) : "");
  return tenths ? text + "." + Math.floor(at.getUTCMilliseconds() / 100) : text;
}

/** A moment in full, in UTC. */
export function moment(unix) {
  return new Date(unix * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";
}
