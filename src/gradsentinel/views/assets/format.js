// Numbers, times and sizes as people read them.

import { language, t } from "./strings.js";

const NONFINITE = { nan: "NaN", inf: "∞", "-inf": "−∞" };

/** True for a number that is one: NaN and Inf come as strings. */
export function finite(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** A number in few characters. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (!finite(value)) return NONFINITE[String(value).toLowerCase()] ?? String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return whole(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

/** A whole number, its thousands apart. */
export function whole(value) {
  if (!finite(value)) return number(value);
  return Math.abs(value) < 10000 ? String(value) : value.toLocaleString("en-US");
}

/** A tick of an axis: short. */
export function tick(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(0).replace("e+", "e");
  return trim(value);
}

function trim(value) {
  return String(Number(value.toPrecision(3)));
}

/** A share of one. */
export function percent(share, digits = 1) {
  if (!finite(share)) return "–";
  const value = share * 100;
  // 99.98 % must not read 100 %: what was lost would be hidden.
  if (share < 1 && Number(value.toFixed(digits)) === 100) return `>${(100 - 10 ** -digits).toFixed(digits)} %`;
  return `${Number(value.toFixed(digits))} %`;
}

/** Seconds in the unit that suits them. */
export function duration(seconds) {
  if (!finite(seconds)) return "–";
  if (seconds < 0.9995) return seconds < 0.00995 ? `${(seconds * 1e3).toFixed(1)} ms` : `${(seconds * 1e3).toFixed(0)} ms`;
  if (seconds < 100) return `${seconds < 9.95 ? seconds.toFixed(1) : seconds.toFixed(0)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

/** A number of bytes. */
export function bytes(count) {
  if (!finite(count)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = count;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return unit ? `${size.toFixed(1)} ${units[unit]}` : `${size} B`;
}

function moment(time) {
  if (time === null || time === undefined || time === "") return null;
  const made = typeof time === "number" ? new Date(time * 1000) : new Date(time);
  return Number.isNaN(made.getTime()) ? null : made;
}

/** A time, in UTC: hosts of a job and people who look at it may be in several zones. */
export function clock(time) {
  const made = moment(time);
  if (!made) return time ? String(time) : "–";
  return `${made.toISOString().slice(0, 10)} ${made.toISOString().slice(11, 19)} UTC`;
}

/** How long one moment is after another. */
export function between(from, to) {
  const [a, b] = [moment(from), moment(to)];
  return a && b ? duration(Math.max(0, (b - a) / 1000)) : "–";
}

/** How long ago. */
export function ago(time) {
  const made = moment(time);
  if (!made) return "–";
  return t("time.ago", { time: duration(Math.max(0, (Date.now() - made.getTime()) / 1000)) });
}

/** The sum of an incident's seconds, whether they come as a number or by phase. */
export function cost(seconds) {
  if (finite(seconds)) return seconds;
  if (!seconds || typeof seconds !== "object") return null;
  return Object.values(seconds).filter(finite).reduce((sum, one) => sum + one, 0);
}

/** A list of words in the language in use. */
export function listed(words) {
  return words.join(language() === "zh" ? "、" : ", ");
}
