// All incidents of a run: sorted, filtered, one a row.

import { h, refill } from "./dom.js";
import { cost, duration, percent, whole } from "./format.js";
import { outcome, severity } from "./marks.js";
import { card, empty } from "./parts.js";
import { counted, label, t } from "./strings.js";

const GRADES = ["warning", "error", "critical"];
const COLUMNS = [
  { key: "severity", value: (one) => GRADES.indexOf(one.severity) },
  { key: "step", value: (one) => one.iteration ?? one.step, number: true },
  { key: "kind", value: (one) => label("kind", one.kind) },
  { key: "cause", value: (one) => label("cause", one.cause) },
  { key: "where", value: (one) => one.where ?? "" },
  { key: "who", value: (one) => one.who ?? "" },
  { key: "action", value: (one) => label("action", one.action) },
  { key: "outcome", value: (one) => label("outcome", one.outcome) },
  { key: "cost", value: (one) => cost(one.seconds) ?? -1, number: true },
];

/** What may be said of a run without incidents to show: not that all is well if not all could be read. */
export function noIncidents(run) {
  if (run.quiet === "sound") return t("overview.no_incidents");
  return run.quiet === "dropped" ? t("overview.not_all_made") : t("overview.not_all_read");
}

/** Return the page. */
export async function incidentsPage(app) {
  const all = await app.source.incidents(app.run, app.lang);
  if (!all.length) return h("div", { class: "gs-page" }, h("h1", null, t("nav.incidents")), empty(noIncidents(await app.source.run(app.run, app.lang))));
  const state = app.remembered("incidents", { sort: "step", down: true, text: "", off: [], cause: "", outcome: "" });
  const place = h("div");
  const count = h("span", { class: "gs-quiet", "aria-live": "polite" });

  function draw() {
    const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = all.filter(
      (one) =>
        !state.off.includes(one.severity) &&
        (!state.cause || (one.cause ?? "unknown") === state.cause) &&
        (!state.outcome || one.outcome === state.outcome) &&
        words.every((word) => text(one).includes(word)),
    );
    const column = COLUMNS.find((one) => one.key === state.sort);
    kept.sort((a, b) => {
      const [x, y] = [column.value(a), column.value(b)];
      const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
      return (state.down ? -order : order) || (a.iteration ?? a.step) - (b.iteration ?? b.step);
    });
    const shown = kept.slice(0, 500);
    count.textContent = kept.length === all.length ? counted("incidents.count", all.length) : t("incidents.some", { kept: kept.length, all: all.length });
    refill(place, kept.length ? incidentRows(app, shown, { sorted: state, sort }) : empty(t("incidents.none")));
  }

  function sort(key) {
    if (state.sort === key) state.down = !state.down;
    else Object.assign(state, { sort: key, down: ["severity", "step", "cost"].includes(key) });
    draw();
    place.querySelector(`button[data-sort="${key}"]`)?.focus();
  }

  const grades = GRADES.filter((name) => all.some((one) => one.severity === name)).reverse();
  const chips = grades.map((name) => {
    const chip = h("button", { type: "button", class: "gs-chip", "aria-pressed": String(!state.off.includes(name)) }, severity(name), h("span", { class: "gs-num" }, String(all.filter((one) => one.severity === name).length)));
    chip.addEventListener("click", () => {
      state.off = state.off.includes(name) ? state.off.filter((one) => one !== name) : [...state.off, name];
      chip.setAttribute("aria-pressed", String(!state.off.includes(name)));
      draw();
    });
    return chip;
  });
  const search = h("input", { type: "search", class: "gs-input", placeholder: t("incidents.search"), "aria-label": t("incidents.search"), value: state.text, on: { input: (event) => ((state.text = event.target.value), draw()) } });
  const filters = h("div", { class: "gs-filters" }, search, h("div", { class: "gs-chips", role: "group", "aria-label": t("column.severity") }, chips), pick("cause", all.map((one) => one.cause ?? "unknown"), state, draw), pick("outcome", all.map((one) => one.outcome), state, draw), count);
  draw();
  return h("div", { class: "gs-page" }, h("h1", null, t("nav.incidents")), card(t("incidents.title"), [filters, place], { wide: true }));
}

function text(one) {
  return [one.id, one.message, one.where, one.who, label("kind", one.kind), label("cause", one.cause), one.kind, one.cause, `${one.step}`].join(" ").toLowerCase();
}

function pick(group, values, state, draw) {
  const known = [...new Set(values)].sort();
  if (known.length < 2) return null;
  return h(
    "select",
    { class: "gs-input", "aria-label": label("column", group), on: { change: (event) => ((state[group] = event.target.value), draw()) } },
    h("option", { value: "" }, t("incidents.any", { what: label("column", group) })),
    known.map((one) => h("option", { value: one, selected: state[group] === one }, label(group, one))),
  );
}

/** A table of incidents, one a row; `brief` leaves out what the overview has no room for. */
export function incidentRows(app, incidents, { brief = false, sorted = null, sort = null } = {}) {
  const columns = COLUMNS.filter((one) => !brief || !["who", "action"].includes(one.key));
  const head = columns.map((one) =>
    h(
      "th",
      { scope: "col", class: one.number ? "gs-num" : null, "aria-sort": sorted?.sort === one.key ? (sorted.down ? "descending" : "ascending") : null },
      sort ? h("button", { type: "button", "data-sort": one.key, on: { click: () => sort(one.key) } }, label("column", one.key), h("span", { class: "gs-sort", "aria-hidden": "true" }, sorted.sort === one.key ? (sorted.down ? "▾" : "▴") : "")) : label("column", one.key),
    ),
  );
  return h(
    "div",
    { class: "gs-scroll" },
    h(
      "table",
      { class: "gs-table gs-incidents" },
      h("thead", null, h("tr", null, head)),
      h(
        "tbody",
        null,
        incidents.map((one) =>
          h(
            "tr",
            { "data-testid": "gs-incident-row", "data-id": one.id, on: { click: (event) => event.target.closest("a") || getSelection().toString() || app.openIncident(one.id) } },
            columns.map((column) => h("td", { class: `gs-col-${column.key}${column.number ? " gs-num" : ""}` }, cell(app, one, column.key))),
          ),
        ),
      ),
    ),
  );
}

function cell(app, one, key) {
  switch (key) {
    case "severity":
      return severity(one.severity);
    case "step":
      return h("a", { href: app.link("incident", one.id), title: one.id }, whole(one.step));
    case "kind":
      return h("a", { href: app.link("incident", one.id), title: one.message }, label("kind", one.kind));
    case "cause":
      return [label("cause", one.cause), typeof one.confidence === "number" && one.cause && one.cause !== "unknown" ? h("span", { class: "gs-quiet" }, ` ${percent(one.confidence, 0)}`) : null];
    case "where":
      return h("span", { class: "gs-mono gs-clip", title: one.where }, one.where || "–");
    case "who":
      return h("span", { class: "gs-clip", title: one.who }, one.who || "–");
    case "action":
      return label("action", one.action);
    case "outcome":
      return outcome(one.outcome);
    default:
      return duration(cost(one.seconds));
  }
}
