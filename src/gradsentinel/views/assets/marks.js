// What happened, as a shape and a colour: neither alone carries the meaning.

import { h, s } from "./dom.js";
import { label } from "./strings.js";

const SHAPES = {
  warning: (r) => `M0 ${-r} L${r} ${r * 0.85} L${-r} ${r * 0.85} Z`,
  error: (r) => `M0 ${-r * 1.15} L${r * 1.15} 0 L0 ${r * 1.15} L${-r * 1.15} 0 Z`,
  critical: (r) => polygon(8, r * 1.15),
  rollback: (r) => `M${-r} 0 L${r * 0.8} ${-r} L${r * 0.8} ${r} Z`,
  restart: (r) => `M${-r * 0.9} 0 A${r * 0.9} ${r * 0.9} 0 1 0 ${r * 0.9} 0 A${r * 0.9} ${r * 0.9} 0 1 0 ${-r * 0.9} 0 Z`,
  abort: (r) => `M${-r} ${-r} H${r} V${r} H${-r} Z`,
  scaler_skip: (r) => `M${-r * 0.25} ${-r * 0.8} H${r * 0.25} V${r * 0.8} H${-r * 0.25} Z`,
};
const CROSSED = new Set(["critical", "abort"]);
const ORDER = ["abort", "critical", "error", "warning", "rollback", "restart", "scaler_skip"];

/** The name of a timeline mark's look: the severity of an incident, else what it is. */
export function look(mark) {
  if (mark.what === "abort") return "abort";
  if (mark.incident || mark.what === "incident") return ["warning", "error", "critical"].includes(mark.severity) ? mark.severity : "warning";
  return SHAPES[mark.what] ? mark.what : null;
}

/** How much a look matters: what is drawn for several marks in one place is the gravest. */
export function gravity(name) {
  const place = ORDER.indexOf(name);
  return place < 0 ? ORDER.length : place;
}

/** The shape as an SVG group around (0, 0). */
export function shape(name, radius) {
  const r = radius * 0.42;
  return s(
    "g",
    { class: `gs-shape gs-${name}` },
    s("path", { d: (SHAPES[name] ?? SHAPES.warning)(radius), class: "gs-shape-body" }),
    CROSSED.has(name) && s("path", { d: `M${-r} ${-r} L${r} ${r} M${r} ${-r} L${-r} ${r}`, class: "gs-shape-cross" }),
  );
}

/** The shape as a small picture in a line of text. */
export function icon(name, size = 12) {
  const half = size / 2;
  const box = `${-half - 1} ${-half - 1} ${size + 2} ${size + 2}`;
  return s("svg", { class: "gs-icon", width: size + 2, height: size + 2, viewBox: box, "aria-hidden": "true" }, shape(name, half * 0.85));
}

/** A severity in words, with its shape. */
export function severity(name) {
  return h("span", { class: `gs-badge gs-tone-${name}` }, icon(SHAPES[name] ? name : "warning", 11), label("severity", name));
}

const GOOD = new Set(["retried", "rescued"]);

/** An outcome in words: saved, dropped, gone back, ended. */
export function outcome(name) {
  const tone = GOOD.has(name) ? "good" : name === "aborted" ? "critical" : name === "rolled_back" ? "info" : "plain";
  return h("span", { class: `gs-badge gs-tone-${tone}` }, label("outcome", name));
}

/** What the shapes mean, for those that occur. */
export function legend(names) {
  const word = (name) => (["warning", "error", "critical"].includes(name) ? label("severity", name) : label("mark", name));
  return h(
    "ul",
    { class: "gs-legend" },
    ORDER.filter((name) => names.includes(name)).map((name) => h("li", null, icon(name, 11), word(name))),
  );
}

function polygon(sides, radius) {
  const corners = Array.from({ length: sides }, (_, k) => {
    const angle = ((k + 0.5) * 2 * Math.PI) / sides;
    return `${(radius * Math.sin(angle)).toFixed(2)} ${(radius * Math.cos(angle)).toFixed(2)}`;
  });
  return `M${corners.join(" L")} Z`;
}
