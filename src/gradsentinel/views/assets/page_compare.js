// Several runs on one axis: each with its own colour and its own dashes.

import { drawn, h, refill, s } from "./dom.js";
import { number, percent, whole } from "./format.js";
import { curve, grid, nearest, vertical } from "./lines.js";
import { card, empty } from "./parts.js";
import { extent, linear } from "./scales.js";
import { label, t } from "./strings.js";
import { favourites } from "./timeline.js";

const MOST = 8;
const HEIGHT = 320;
const LEFT = 58;
const RIGHT = 18;

/** Return the page. */
export async function comparePage(app) {
  const runs = await app.source.runs();
  const names = runs.map((one) => one.name);
  const page = h("div", { class: "gs-page", "data-testid": "gs-compare" }, h("h1", null, t("nav.compare")));
  if (names.length < 2) {
    page.append(empty(t("compare.one"), t("compare.one_more")));
    return page;
  }
  const state = app.remembered("compare", { chosen: names.slice(0, Math.min(4, MOST)), tag: null, log: true });
  state.chosen = state.chosen.filter((name) => names.includes(name));
  const { tags } = await app.source.timeline(app.run, { points: 2 });
  state.tag ??= favourites(tags)[0] ?? null;
  const stage = h("div", { class: "gs-stage" });
  const legend = h("ul", { class: "gs-legend gs-compare-legend" });
  const said = h("p", { class: "gs-readout", "aria-live": "polite" }, t("compare.hint"));
  const board = h("div");
  let data = null;
  const redraw = drawn(stage, (width) => data && draw(width));

  async function fetched() {
    const found = await app.source.compare(state.chosen, state.tag, 800);
    data = found.runs.map((run) => ({ ...run, colour: state.chosen.indexOf(run.name) }));
    refill(legend, data.map((run) => h("li", null, s("svg", { width: 26, height: 10, "aria-hidden": "true", class: `gs-run-${run.colour}` }, s("path", { d: "M0 5H26", class: "gs-curve-line" })), h("span", { class: "gs-mono" }, run.name), run.points.length ? null : h("span", { class: "gs-quiet" }, ` (${t("compare.no_tag")})`))));
    redraw();
    await summarise();
  }

  async function summarise() {
    const found = await Promise.all(state.chosen.map((name) => app.source.run(name, app.lang).catch(() => null)));
    const columns = ["run", "state", "applied", "useful", "incidents", "lost", "starts"];
    const rows = found.map((run, k) => {
      const n = run?.numbers ?? {};
      return h("tr", null, h("td", { class: "gs-mono" }, h("a", { href: app.link("", null, state.chosen[k]) }, state.chosen[k])), ...(run ? [h("td", null, label("state", run.state)), num(whole(n.applied ?? run.steps ?? null)), num(percent(n.useful_share, 2)), num(whole(n.incidents ?? 0)), num(whole(n.lost_batches ?? null)), num(whole(run.starts ?? null))] : [h("td", { colspan: 6 }, t("compare.unreadable"))]));
    });
    refill(board, h("div", { class: "gs-scroll" }, h("table", { class: "gs-table" }, h("thead", null, h("tr", null, columns.map((name, k) => h("th", { scope: "col", class: k > 1 ? "gs-num" : null }, label("column", name))))), h("tbody", null, rows))));
  }

  function draw(width) {
    const filled = data.filter((run) => run.points.length);
    if (!filled.length) {
      refill(stage, h("p", { class: "gs-empty" }, t("timeline.empty")));
      return;
    }
    const [first, last] = extent(filled.flatMap((run) => run.points.map((point) => point[0])));
    const right = width - RIGHT;
    const x = linear(first, Math.max(last, first + 1), LEFT, right);
    const y = vertical(filled, state.log, 14, HEIGHT - 8);
    const line = s("line", { class: "gs-cursor-line", y1: 14, y2: HEIGHT, visibility: "hidden" });
    const plot = s(
      "svg",
      { width, height: HEIGHT + 26, class: "gs-plot", role: "img", "aria-label": t("compare.aria", { tag: state.tag, count: filled.length }) },
      grid(y, LEFT, right, 6),
      x.ticks(Math.max(3, Math.floor(width / 130))).filter(Number.isInteger).map((value) => s("text", { class: "gs-axis", x: x.place(value), y: HEIGHT + 16, "text-anchor": "middle" }, whole(value))),
      filled.map((run) => curve(run.points, x, y, 14, { class: `gs-curve gs-run-${run.colour}` })),
      line,
    );
    plot.addEventListener("pointermove", (event) => {
      const at = x.value(event.clientX - plot.getBoundingClientRect().left);
      if (at < first || at > last) return;
      line.setAttribute("x1", x.place(at));
      line.setAttribute("x2", x.place(at));
      line.setAttribute("visibility", "visible");
      refill(said, h("strong", null, t("timeline.at", { iteration: whole(Math.round(at)) })), " ", filled.map((run) => h("span", { class: `gs-compare-value gs-run-${run.colour}` }, h("span", { class: "gs-run-dot" }), `${run.name} `, h("b", null, number(nearest(run.points, at)?.[3])))));
    });
    refill(stage, plot);
  }

  const boxes = names.slice(0, 200).map((name) => {
    const input = h("input", { type: "checkbox", checked: state.chosen.includes(name) });
    input.addEventListener("change", () => {
      if (input.checked && state.chosen.length >= MOST) input.checked = false;
      else state.chosen = input.checked ? [...state.chosen, name] : state.chosen.filter((one) => one !== name);
      fetched();
    });
    return h("label", { class: "gs-check" }, input, h("span", { class: "gs-mono" }, name));
  });
  const choose = h("select", { class: "gs-input", "aria-label": t("compare.tag"), on: { change: (event) => ((state.tag = event.target.value), fetched()) } }, tags.map((tag) => h("option", { value: tag, selected: tag === state.tag }, label("tag", tag.replace(/^gradsentinel\//, "")))));
  const scale = h("button", { type: "button", class: "gs-button", on: { click: () => ((state.log = !state.log), (scale.textContent = t(state.log ? "timeline.log" : "timeline.linear")), redraw()) } }, t(state.log ? "timeline.log" : "timeline.linear"));
  page.append(
    card(t("compare.runs"), h("div", { class: "gs-checks", role: "group", "aria-label": t("compare.runs") }, boxes), { note: t("compare.most", { most: MOST }) }),
    card(t("compare.chart"), [h("div", { class: "gs-timeline-bar" }, choose, h("span", { class: "gs-push" }), scale), legend, stage, said], { wide: true }),
    card(t("compare.numbers"), board, { wide: true }),
  );
  await fetched();
  return page;
}

function num(text) {
  return h("td", { class: "gs-num" }, text);
}
