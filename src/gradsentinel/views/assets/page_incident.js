// One incident: what to do, what happened, where, how it spread, and what is there to go on with.

import { h } from "./dom.js";
import { bytes, clock, cost, duration, finite, listed, number, percent, whole } from "./format.js";
import { layerMap } from "./heat_layers.js";
import { rankMap } from "./heat_ranks.js";
import { outcome, severity } from "./marks.js";
import { card, command, facts } from "./parts.js";
import { sliced } from "./source.js";
import { spreadGraph } from "./spread.js";
import { counted, label, t } from "./strings.js";
import { timeline } from "./timeline.js";

const MOST_ROWS = 12;

/** Return the page. */
export async function incidentPage(app, id) {
  const data = await app.source.incident(app.run, id, app.lang);
  const { incident, heat } = data;
  const cells = heat?.ranks?.cells ?? [];
  const large = cells.length > 32;
  const hot = cells.some((cell) => cell.hot > 0);
  const ranks = card(t("incident.ranks"), rankMap(heat?.ranks), { note: hot && large ? t("incident.ranks_note") : null });
  const stack = (...parts) => h("div", { class: "gs-stack" }, parts);
  const body = [
    h("div", { class: "gs-columns gs-columns-main" }, stack(todo(data), card(t("incident.story"), story(data)), large ? null : commands(data.commands ?? [])), stack(verdict(incident), large ? null : ranks)),
    large ? [ranks, commands(data.commands ?? [])] : null,
    card(t("incident.around"), nearby(app, data)),
    card(t("incident.layers"), layerMap(heat?.layers, incident.iteration ?? incident.step), { note: heat?.layers?.names?.length ? t("incident.layers_note") : null }),
    h("div", { class: "gs-columns gs-columns-2" }, card(t("incident.spread"), spreadGraph(data.spread), { note: t("incident.spread_note") }), evidence(data)),
    h("div", { class: "gs-columns gs-columns-2" }, tensors(incident), stack(samples(incident), details(incident), files(data.files ?? []))),
    h("details", { class: "gs-raw" }, h("summary", null, t("incident.raw")), h("pre", null, JSON.stringify(incident, null, 2))),
  ];
  return h("article", { class: "gs-page", "data-testid": "gs-incident-page", "data-id": id }, headline(app, data), body);
}

function commands(list) {
  if (!list.length) return null;
  const rows = list.map((one) => command(one.label ?? one.what, one.line));
  const target = list.some((one) => one.line.includes("--target"));
  return card(t("incident.commands"), h("ul", { class: "gs-commands", "data-testid": "gs-commands" }, rows), { note: target ? t("incident.commands_note") : null });
}

function headline(app, { incident, row, neighbours }) {
  const { previous, next } = neighbours ?? {};
  const step = (target, key, sign) =>
    target ? h("a", { class: "gs-button", href: app.link("incident", target), "data-go": key }, sign < 0 ? `← ${t(`incident.${key}`)}` : `${t(`incident.${key}`)} →`) : h("span", { class: "gs-button gs-off", "aria-disabled": "true" }, sign < 0 ? `← ${t(`incident.${key}`)}` : `${t(`incident.${key}`)} →`);
  const d = incident.diagnosis;
  const place = place_(incident);
  return h(
    "header",
    { class: `gs-incident-head gs-edge-${incident.severity}` },
    h("nav", { class: "gs-incident-nav", "aria-label": t("incident.nav") }, h("a", { class: "gs-button", href: app.link("incidents") }, t("incident.all")), step(previous, "previous", -1), step(next, "next", 1)),
    h("p", { class: "gs-status-line" }, severity(incident.severity), outcome(incident.outcome), h("span", { class: "gs-mono gs-quiet" }, incident.id), h("span", { class: "gs-quiet" }, clock(incident.time))),
    h("h1", null, t("incident.title", { step: whole(incident.step), kind: label("kind", incident.kind) })),
    h("p", { class: "gs-lede" }, row?.message ?? incident.message),
    place && h("p", { class: "gs-place" }, h("span", { class: "gs-eyebrow" }, t("incident.where")), h("span", { class: "gs-mono" }, place), d?.source && h("span", { class: "gs-mono gs-quiet" }, d.source)),
  );
}

function place_(incident) {
  const d = incident.diagnosis;
  if (incident.samples?.length) return listed(incident.samples.slice(0, 3).map((one) => t("incident.sample", { position: one.position }) + (one.id === null || one.id === undefined ? "" : ` (id ${one.id})`)));
  if (d?.module) return d.op ? `${d.module} · ${d.op}` : d.module;
  const names = (incident.parameters ?? []).map((one) => one.name);
  if (incident.kind === "nonfinite_loss" || !names.length) return d?.op ?? "";
  return listed(names.slice(0, 2)) + (names.length > 2 ? ` … (${names.length})` : "");
}

function todo(data) {
  const steps = data.todo ?? [];
  const body = steps.length ? h("ol", { class: "gs-todo" }, steps.map((one) => h("li", null, one))) : h("p", { class: "gs-quiet" }, t("incident.no_todo"));
  return card(t("incident.todo"), body, { tone: "todo" });
}

function verdict(incident) {
  const d = incident.diagnosis;
  const sure = d && finite(d.confidence) && d.confidence > 0;
  const top = h(
    "div",
    { class: "gs-verdict-top" },
    h("div", { class: "gs-cause" }, label("cause", d?.cause ?? "unknown")),
    sure && h("div", { class: "gs-confidence" }, h("span", { class: "gs-bar-track", "aria-hidden": "true" }, h("span", { class: "gs-bar-fill", style: { width: percent(d.confidence, 0).replace(" ", "") } })), h("span", { class: "gs-quiet" }, t("incident.confidence", { share: percent(d.confidence, 0) }))),
  );
  const mono = (value) => (value ? h("span", { class: "gs-mono" }, value) : null);
  const rows = facts([
    [t("fact.phase"), d?.phase ? label("phase", d.phase) : null],
    [t("fact.module"), mono(d?.module)],
    [t("fact.op"), mono(d?.op)],
    [t("fact.node"), mono(d?.node)],
    [t("fact.source"), mono(d?.source)],
    [t("fact.ranks"), incident.ranks_folded || null],
    [t("fact.microbatch"), incident.microbatch],
    [t("fact.loss"), incident.loss === null || incident.loss === undefined ? null : number(incident.loss)],
    [t("fact.norm"), incident.grad_norm === null || incident.grad_norm === undefined ? null : number(incident.grad_norm)],
    [t("fact.action"), label("action", incident.action)],
    [t("fact.detector"), mono(incident.detector)],
    [t("fact.cost"), costs(incident.seconds)],
  ]);
  return card(t("incident.cause"), [top, rows]);
}

function costs(seconds) {
  const total = cost(seconds);
  if (total === null) return null;
  const parts = Object.entries(seconds).map(([name, value]) => `${label("seconds", name)} ${duration(value)}`);
  // What belongs together stays on one line, which Chinese does not do by itself.
  if (parts.length < 2) return duration(total);
  const comma = listed(["", ""]);
  const last = parts.length - 1;
  const shown = parts.map((one, k) => [h("span", { class: "gs-one-line" }, (k ? "" : "(") + one + (k < last ? comma.trimEnd() : ")")), k < last && (comma.endsWith(" ") ? " " : h("wbr"))]);
  return [duration(total), " ", h("span", { class: "gs-quiet" }, shown)];
}

function story(data) {
  return h("div", { class: "gs-story" }, (data.story ?? []).map((one) => h("p", null, one)));
}

function nearby(app, { incident, place, around }) {
  const at = place ?? incident.iteration ?? incident.step;
  // A report has every step around the incident, and fewer of the rest.
  const inside = ({ start, stop }) => around && start >= around.start && stop <= around.stop;
  return timeline({
    load: (what) => (inside(what) ? Promise.resolve(sliced(around, what)) : app.source.timeline(app.run, what)),
    open: app.openIncident,
    around: [Math.max(0, at - 40), at + 40],
    here: incident.id,
    compact: true,
  });
}

function evidence({ incident, evidence: told }) {
  const list = told ?? incident.diagnosis?.evidence ?? [];
  if (!list.length) return null;
  return card(t("incident.evidence"), h("ul", { class: "gs-evidence" }, list.map((one) => h("li", null, one))));
}

function table(head, rows, right = []) {
  const shown = rows.slice(0, MOST_ROWS);
  const rest = rows.slice(MOST_ROWS);
  const line = (row) => h("tr", null, row.map((cell, k) => h("td", { class: right.includes(k) ? "gs-num" : null }, cell)));
  const body = h("tbody", null, shown.map(line));
  const more = rest.length
    ? h("button", { type: "button", class: "gs-button gs-show-all", on: { click: (event) => (body.append(...rest.slice(0, 5000).map(line)), event.target.remove()) } }, counted("table.more", rest.length))
    : null;
  return [h("div", { class: "gs-scroll" }, h("table", { class: "gs-table" }, h("thead", null, h("tr", null, head.map((name, k) => h("th", { scope: "col", class: right.includes(k) ? "gs-num" : null }, label("column", name))))), body)), more];
}

function tensors(incident) {
  const list = incident.parameters ?? [];
  if (!list.length) return null;
  const total = incident.details?.tensor_count ?? list.length;
  const rows = list.map((one) => [h("span", { class: "gs-mono" }, one.name), `${one.counted === false ? "≥ " : ""}${t("tensor.share", { bad: whole(one.nonfinite), all: whole(one.numel) })}`, number(one.norm), one.first_index ? h("span", { class: "gs-mono" }, `[${one.first_index.join(", ")}]`) : "–"]);
  return card(t("incident.tensors", { count: whole(total) }), table(["tensor", "nonfinite", "norm", "first"], rows, [1, 2]));
}

function samples(incident) {
  const list = incident.samples ?? [];
  if (!list.length) return null;
  const rows = list.map((one) => [whole(one.position), one.id === null || one.id === undefined ? "–" : h("span", { class: "gs-mono" }, typeof one.id === "string" ? one.id : JSON.stringify(one.id)), one.field ? h("span", { class: "gs-mono" }, one.field) : "–"]);
  return card(t("incident.samples", { count: list.length }), table(["position", "id", "field"], rows, [0]));
}

function files(list) {
  if (!list.length) return null;
  const rows = list.map((one) => [h("span", { class: "gs-mono" }, one.name), bytes(one.bytes)]);
  return card(t("incident.files"), table(["file", "size"], rows, [1]), { note: t("incident.files_note") });
}

function details(incident) {
  const rows = Object.entries(incident.details ?? {}).filter(([, value]) => value !== null);
  if (!rows.length) return null;
  const told = (value) => (typeof value === "object" ? JSON.stringify(value) : finite(value) ? number(value) : String(value));
  return card(t("incident.details"), facts(rows.map(([name, value]) => [label("detail", name), h("span", { class: "gs-mono gs-wrap" }, told(value))])));
}
