// One panel of a chart: a line with the range of each bucket, on a logarithmic axis where that is possible.

import { s } from "./dom.js";
import { finite, tick } from "./format.js";
import { extent, linear, logarithmic } from "./scales.js";

/** The part of a series inside a range, with one point more on each side so that lines reach the edge. */
export function within(points, start, stop) {
  let from = points.findIndex((point) => point[0] >= start);
  if (from < 0) return points.slice(-1);
  let to = from;
  while (to < points.length && points[to][0] <= stop) to += 1;
  from = Math.max(0, from - 1);
  return points.slice(from, to + 1);
}

/** The point of a series nearest to an iteration, or null; points are in order. */
export function nearest(points, iteration) {
  let low = 0;
  let high = points.length - 1;
  if (high < 0) return null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= iteration) low = middle;
    else high = middle;
  }
  return Math.abs(points[low][0] - iteration) <= Math.abs(points[high][0] - iteration) ? points[low] : points[high];
}

/** The vertical axis of some series; logarithmic if asked for and every number is positive. */
export function vertical(series, wanted, top, bottom) {
  const values = series.flatMap((one) => one.points.flatMap((point) => point.slice(1, 4).filter(finite)));
  const range = extent(values);
  if (!range) return { log: wanted, place: () => bottom, ticks: () => [] };
  let [low, high] = range;
  const log = wanted && low > 0;
  if (log) {
    if (high / low < 1.05) [low, high] = [low / 1.05, high * 1.05];
    const pad = (high / low) ** 0.06;
    return { log, ...logarithmic(low / pad, high * pad, bottom, top) };
  }
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) [low, high] = [low - 1, high + 1];
  const pad = (high - low) * 0.06;
  return { log, ...linear(low - pad, high + pad, bottom, top) };
}

/** Horizontal lines with numbers. */
export function grid(axis, left, right, count) {
  return axis.ticks(count).map((value) => {
    const y = axis.place(value).toFixed(1);
    return s(
      "g",
      { class: "gs-tick" },
      s("line", { x1: left, x2: right, y1: y, y2: y }),
      s("text", { x: left - 8, y, dy: "0.32em", "text-anchor": "end" }, tick(value)),
    );
  });
}

/** The line of the last values, the range inside each bucket, and a cross where a value is not finite. */
export function curve(points, x, y, top, props) {
  let line = "";
  let range = "";
  const bad = [];
  let open = false;
  for (const [iteration, low, high, last, odd] of points) {
    const at = x.place(iteration).toFixed(1);
    if (finite(low) && finite(high) && high > low) range += `M${at} ${y.place(low).toFixed(1)}V${y.place(high).toFixed(1)}`;
    if (odd?.length || [low, high, last].some((value) => typeof value === "string")) bad.push(at);
    if (finite(last)) {
      line += `${open ? "L" : "M"}${at} ${y.place(last).toFixed(1)}`;
      open = true;
    } else open = false;
  }
  return s(
    "g",
    { class: "gs-curve", ...props },
    s("path", { d: range, class: "gs-curve-range" }),
    s("path", { d: line, class: "gs-curve-line" }),
    points.length === 1 && finite(points[0][3]) && s("circle", { cx: x.place(points[0][0]), cy: y.place(points[0][3]), r: 3, class: "gs-curve-dot" }),
    bad.map((at) => s("path", { d: `M${at - 4} ${top + 3}l8 8m0 -8l-8 8`, class: "gs-curve-bad" })),
  );
}
