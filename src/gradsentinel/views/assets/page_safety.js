// What the run could fall back on, and how much of each recovery is left.

import { drawn, h, refill, s } from "./dom.js";
import { bytes, clock, whole } from "./format.js";
import { card, empty } from "./parts.js";
import { linear } from "./scales.js";
import { counted, label, t } from "./strings.js";

const STATES = ["good", "probation", "damaged", "unknown", "gone"];

/** Return the page. */
export async function safetyPage(app) {
  const run = await app.source.run(app.run, app.lang);
  return h(
    "div",
    { class: "gs-page" },
    h("h1", null, t("nav.safety")),
    card(t("safety.snapshots"), run.snapshots?.length ? [snapshotTrack(run, true), table(run.snapshots)] : empty(t("safety.no_snapshots"), t("safety.no_snapshots_more")), { wide: true, note: run.snapshots?.length ? t("safety.snapshots_note") : null }),
    card(t("safety.budgets"), run.budgets?.length ? budgetBars(run.budgets) : empty(t("safety.no_budgets"), t("safety.no_budgets_more")), { wide: true, note: run.budgets?.length ? t("safety.budgets_note") : null }),
  );
}

/** The snapshots along the steps of the run. */
export function snapshotTrack(run, large) {
  // What was in the memory of a process that has ended is gone with it.
  const snapshots = run.snapshots.map((one) => (one.gone ? { ...one, state: "gone" } : one)).sort((a, b) => a.step - b.step);
  const newest = [...snapshots].reverse().find((one) => one.state === "good");
  const root = h("div");
  const stage = h("div");
  drawn(stage, (width) => {
    const last = Math.max(run.steps ?? 0, ...snapshots.map((one) => one.step));
    const first = Math.min(0, ...snapshots.map((one) => one.step));
    const x = linear(first, Math.max(last, first + 1), 14, width - 14);
    const y = large ? 30 : 24;
    refill(
      stage,
      s(
        "svg",
        { width, height: y + 34, role: "img", "aria-label": counted("safety.track", snapshots.length) },
        s("line", { class: "gs-rail", x1: 14, x2: width - 14, y1: y, y2: y }),
        x.ticks(Math.max(2, Math.floor(width / 110))).filter(Number.isInteger).map((value) => s("g", null, s("line", { class: "gs-rail", x1: x.place(value), x2: x.place(value), y1: y - 3, y2: y + 3 }), s("text", { class: "gs-axis", x: x.place(value), y: y + 26, "text-anchor": "middle" }, whole(value)))),
        snapshots.map((one) => s("g", { class: `gs-snap gs-snap-${known(one.state)}`, transform: `translate(${x.place(one.step).toFixed(1)} ${y})` }, s("title", null, `${t("step", { step: whole(one.step) })}: ${label("snapshot", one.state)}`), figure(one.state, 7))),
      ),
    );
  });
  const lost = newest ? (run.steps ?? newest.step) - newest.step : null;
  const past = !newest && snapshots.every((one) => one.state === "gone");
  const verdict = past ? t("safety.gone") : newest ? t("safety.newest", { step: whole(newest.step), steps: whole(Math.max(0, lost)) }) : t("safety.no_good");
  const present = STATES.filter((name) => snapshots.some((one) => known(one.state) === name));
  root.append(
    h("p", { class: newest || past ? "gs-verdict" : "gs-verdict gs-verdict-bad" }, verdict),
    stage,
    h("ul", { class: "gs-legend" }, present.map((name) => h("li", { class: `gs-snap gs-snap-${name}` }, s("svg", { width: 16, height: 16, viewBox: "-8 -8 16 16", "aria-hidden": "true" }, figure(name, 5.5)), label("snapshot", name)))),
  );
  return root;
}

function known(state) {
  return STATES.includes(state) ? state : "unknown";
}

/** Good: a filled disc with a tick. On probation: a ring. Damaged: a square with a cross. Unknown: a dashed ring. */
function figure(state, r) {
  const name = known(state);
  if (name === "damaged") return [s("rect", { x: -r, y: -r, width: 2 * r, height: 2 * r, rx: 1.5 }), s("path", { class: "gs-snap-sign", d: `M${-r / 2} ${-r / 2}L${r / 2} ${r / 2}M${r / 2} ${-r / 2}L${-r / 2} ${r / 2}` })];
  return [s("circle", { r }), name === "good" && s("path", { class: "gs-snap-sign", d: `M${-r * 0.45} ${r * 0.02}L${-r * 0.1} ${r * 0.4}L${r * 0.5} ${-r * 0.38}` })];
}

function table(snapshots) {
  const columns = ["step", "iteration", "state", "where", "size", "time", "ranks"];
  const numbers = new Set(["step", "iteration", "size", "ranks"]);
  return h(
    "div",
    { class: "gs-scroll" },
    h(
      "table",
      { class: "gs-table" },
      h("thead", null, h("tr", null, columns.map((name) => h("th", { scope: "col", class: numbers.has(name) ? "gs-num" : null }, label("column", name))))),
      h(
        "tbody",
        null,
        snapshots.map((one) => (one.gone ? { ...one, state: "gone" } : one)).sort((a, b) => b.step - a.step).slice(0, 100).map((one) =>
          h(
            "tr",
            null,
            h("td", { class: "gs-num" }, whole(one.step)),
            h("td", { class: "gs-num" }, whole(one.iteration)),
            h("td", null, h("span", { class: `gs-badge gs-tone-${{ good: "good", damaged: "critical", probation: "info" }[one.state] ?? "plain"}` }, label("snapshot", one.state))),
            h("td", null, label("place", one.where)),
            h("td", { class: "gs-num" }, bytes(one.bytes)),
            h("td", null, clock(one.time)),
            h("td", { class: "gs-num" }, Array.isArray(one.ranks) ? String(one.ranks.length) : whole(one.ranks)),
          ),
        ),
      ),
    ),
  );
}

/** Each budget as a bar: how much is used, how much is left. */
export function budgetBars(budgets) {
  return h(
    "ul",
    { class: "gs-budgets" },
    budgets.map((one) => {
      const share = one.limit ? Math.min(1, one.used / one.limit) : 0;
      const tone = one.limit && one.used >= one.limit ? "critical" : share >= 0.7 ? "error" : "good";
      const cells = one.limit && one.limit <= 40 ? Array.from({ length: one.limit }, (_, k) => h("span", { class: k < one.used ? "gs-used" : "gs-left" })) : h("span", { class: "gs-bar-fill", style: { width: `${100 * share}%` } });
      return h(
        "li",
        { class: `gs-budget gs-edge-${tone}` },
        h("div", { class: "gs-budget-head" }, h("strong", null, label("budget", one.name)), h("span", { class: "gs-num" }, t("budget.used", { used: whole(one.used), limit: one.limit === null || one.limit === undefined ? "∞" : whole(one.limit) }))),
        h("div", { class: `gs-budget-track${one.limit && one.limit <= 40 ? " gs-budget-cells" : ""}`, "aria-hidden": "true" }, cells),
        h("div", { class: "gs-quiet" }, one.limit && one.used >= one.limit ? t("budget.gone") : t("budget.left", { left: one.left === null || one.left === undefined ? "∞" : whole(one.left) }), one.window ? ` · ${t("budget.window", { window: whole(one.window) })}` : ""),
      );
    }),
  );
}
