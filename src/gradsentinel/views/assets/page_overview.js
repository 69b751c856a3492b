// The run in one look: what state it is in, where to look first, the numbers, the timeline.

import { h } from "./dom.js";
import { ago, between, clock, listed, number, percent, whole } from "./format.js";
import { incidentRows, noIncidents } from "./page_incidents.js";
import { bars, card, empty, facts, tile } from "./parts.js";
import { icon, outcome, severity } from "./marks.js";
import { budgetBars, snapshotTrack } from "./page_safety.js";
import { counted, label, t } from "./strings.js";
import { timeline } from "./timeline.js";

const GRAVE = ["critical", "error", "warning"];

/** Return the page. */
export async function overviewPage(app) {
  const [run, incidents] = await Promise.all([app.source.run(app.run, app.lang), app.source.incidents(app.run, app.lang)]);
  if (run.reading < 1) app.soon();
  const chart = timeline({ load: (what) => app.source.timeline(app.run, what), open: app.openIncident });
  app.refreshes(chart.refresh);
  const page = h("div", { class: "gs-page gs-overview" }, status(run), run.reading < 1 ? h("p", { class: "gs-quiet" }, t("overview.reading", { share: percent(run.reading, 0) })) : null, run.problems?.length ? problems(run.problems) : null);
  const urgent = worst(incidents);
  if (urgent) page.append(await lookHere(app, urgent));
  page.append(...warnings(run), numbers(run), card(t("overview.timeline"), chart, { wide: true }));
  if (!incidents.length) page.append(empty(run.state === "empty" ? t("overview.no_events") : noIncidents(run)));
  else {
    page.append(
      card(t("overview.incidents"), incidentRows(app, [...incidents].reverse().slice(0, 8), { brief: true }), {
        wide: true,
        aside: h("a", { href: app.link("incidents"), class: "gs-more" }, counted("overview.all_incidents", incidents.length)),
      }),
      h(
        "div",
        { class: "gs-columns" },
        card(t("overview.by_cause"), bars(run.numbers?.by_cause, (key) => label("cause", key))),
        card(t("overview.by_kind"), bars(run.numbers?.by_kind, (key) => label("kind", key))),
        card(t("overview.by_outcome"), bars(run.numbers?.by_outcome, (key) => label("outcome", key))),
      ),
    );
  }
  const safety = [];
  if (run.snapshots?.length) safety.push(card(t("safety.snapshots"), snapshotTrack(run, false), { aside: h("a", { href: app.link("safety"), class: "gs-more" }, t("more")) }));
  if (run.budgets?.length) safety.push(card(t("safety.budgets"), budgetBars(run.budgets), { aside: h("a", { href: app.link("safety"), class: "gs-more" }, t("more")) }));
  if (safety.length) page.append(h("div", { class: "gs-columns gs-columns-2" }, safety));
  page.append(card(t("overview.about"), about(run)));
  return page;
}

function status(run) {
  const tone = { aborted: "critical", failed: "error", running: "info", ended: "good" }[run.state] ?? "plain";
  return h(
    "header",
    { class: "gs-status" },
    h("p", { class: "gs-status-line" }, h("span", { class: `gs-badge gs-tone-${tone}` }, h("span", { class: "gs-dot" }), label("state", run.state)), h("span", { class: "gs-run-name" }, named(run)), run.updated && h("span", { class: "gs-quiet" }, run.state === "running" ? t("overview.updated", { when: ago(run.updated) }) : clock(run.updated))),
    h("h1", { "data-testid": "gs-headline" }, run.headline),
  );
}

function named(run) {
  return run.name === "." ? (run.path?.split("/").filter(Boolean).pop() ?? ".") : run.name;
}

function problems(list) {
  return h("section", { class: "gs-problems", role: "note" }, h("h2", null, counted("overview.problems", list.length)), h("ul", null, list.slice(0, 20).map((one) => h("li", null, one))));
}

/** The incident to look at first: what ended the run, else the gravest, of these the latest. */
export function worst(incidents) {
  const grade = (one) => (one.outcome === "aborted" ? 0 : 1 + Math.max(0, GRAVE.indexOf(one.severity)));
  return incidents.reduce((found, one) => (!found || grade(one) <= grade(found) ? one : found), null);
}

async function lookHere(app, brief) {
  let todo = [];
  try {
    todo = (await app.source.incident(app.run, brief.id, app.lang)).todo ?? [];
  } catch {
    // Its page says what is wrong with it.
  }
  return h(
    "a",
    { class: `gs-look gs-edge-${brief.severity}`, href: app.link("incident", brief.id), "data-testid": "gs-look" },
    h("div", { class: "gs-look-icon" }, icon(brief.severity, 26)),
    h(
      "div",
      null,
      h("p", { class: "gs-look-head" }, h("span", { class: "gs-eyebrow" }, t("overview.look_here")), severity(brief.severity), outcome(brief.outcome)),
      h("p", { class: "gs-look-title" }, t("incident.title", { step: whole(brief.step), kind: label("kind", brief.kind) })),
      brief.where && h("p", { class: "gs-look-where gs-mono" }, brief.where),
      h("p", { class: "gs-look-message" }, brief.message),
    ),
    h(
      "div",
      { class: "gs-look-todo" },
      h("p", { class: "gs-eyebrow" }, t("incident.todo")),
      h("p", null, todo[0] ?? t("incident.no_todo")),
      h("p", { class: "gs-more" }, t("overview.open")),
    ),
  );
}

/** What will be missing at the next incident. */
function warnings(run) {
  if (run.state !== "running") return [];
  const gone = (run.budgets ?? []).filter((one) => one.limit && one.used >= one.limit).map((one) => t("overview.budget_gone", { name: label("budget", one.name) }));
  return gone.length ? [h("section", { class: "gs-problems", role: "note" }, h("ul", null, gone.map((one) => h("li", null, one))))] : [];
}

function numbers(run) {
  const n = run.numbers ?? {};
  const by = n.by_severity ?? {};
  const grave = GRAVE.filter((name) => by[name]).map((name) => `${by[name]} ${label("severity", name)}`);
  const lost = n.lost_batches ?? null;
  return h(
    "div",
    { class: "gs-tiles" },
    tile(whole(n.applied ?? run.steps ?? null), t("tile.applied"), run.iterations >= (n.applied ?? run.steps ?? 0) ? t("tile.attempted", { count: whole(run.iterations) }) : null),
    tile(percent(n.useful_share, 2), t("tile.useful"), t("tile.useful_note")),
    tile(whole(n.incidents ?? 0), t("tile.incidents"), grave.length ? listed(grave) : t("tile.none"), by.critical ? "critical" : by.error ? "error" : null),
    tile(whole(lost), t("tile.lost"), t("tile.lost_note")),
    tile(whole(run.starts ?? null), t("tile.starts"), run.starts > 1 ? counted("tile.restarts", run.starts - 1) : t("tile.no_restart")),
    tile(whole(run.world_size ?? null), t("tile.ranks"), run.hosts?.length ? counted("tile.hosts", run.host_count ?? run.hosts.length) : null),
  );
}

function about(run) {
  return facts([
    [t("about.directory"), h("span", { class: "gs-mono" }, run.path ?? run.name)],
    [t("about.started"), clock(run.started)],
    [t("about.updated"), clock(run.updated)],
    [t("about.took"), between(run.started, run.updated)],
    [t("about.steps"), run.steps === null || run.steps === undefined ? null : number(run.steps)],
    [t("about.ranks"), run.world_size ? (run.ranks_seen && run.ranks_seen !== run.world_size ? t("about.ranks_seen", { seen: whole(Array.isArray(run.ranks_seen) ? run.ranks_seen.length : run.ranks_seen), all: whole(run.world_size) }) : whole(run.world_size)) : null],
    [t("about.hosts"), run.hosts?.length ? h("span", { class: "gs-mono" }, run.hosts.slice(0, 12).join(", ") + (run.hosts.length > 12 ? " …" : "")) : null],
    [t("about.version"), run.version ? h("span", { class: "gs-mono" }, run.version) : null],
  ]);
}
