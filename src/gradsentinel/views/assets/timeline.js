// The run on one axis: panels of numbers, what happened as marks above them, a strip of the whole run below.

import { drawn, h, refill, s } from "./dom.js";
import { number, whole } from "./format.js";
import { curve, grid, nearest, vertical, within } from "./lines.js";
import { gravity, legend, look, shape } from "./marks.js";
import { linear } from "./scales.js";
import { label, t } from "./strings.js";

const LEFT = 58;
const RIGHT = 18;
const LANE = 34;
const PANEL = 132;
const GAP = 26;
const STRIP = 40;
const CLOSE = 13; // pixels between marks that are drawn as one

/** The tags that are shown first: the loss and the gradient norm, whatever stands before their names. */
export function favourites(tags) {
  const found = [/(^|\/)loss$/, /(^|\/)grad_norm$/].map((one) => tags.find((tag) => one.test(tag))).filter(Boolean);
  return found.length ? found : tags.slice(0, 2);
}

/**
 * Return the element. `load({tags, start, stop})` gives the data of the contract's `timeline`; `open(id)` shows an
 * incident; `around` limits it to a range at first; `here` names the incident that the page is about.
 */
export function timeline({ load, open, around = null, here = null, compact = false }) {
  const state = { full: null, data: null, tags: null, range: around, log: true, cursor: null, drag: null, turn: 0 };
  const bar = h("div", { class: "gs-timeline-bar" });
  const stage = h("div", { class: "gs-stage", tabindex: 0, role: "group", "aria-label": t("timeline.aria") });
  const tip = h("div", { class: "gs-tip", hidden: true });
  const said = h("div", { class: "gs-unseen", "aria-live": "polite" });
  const frame = h("div", { class: "gs-stage-frame" }, stage, tip);
  const foot = h("div", { class: "gs-timeline-foot" });
  const root = h("div", { class: "gs-timeline", "data-testid": "gs-timeline" }, bar, frame, foot, said);
  let view = null; // what the last drawing put where
  const redraw = drawn(stage, draw);

  async function fetched() {
    state.turn += 1;
    const turn = state.turn;
    const range = state.range;
    const data = await load({ tags: state.tags, start: range?.[0], stop: range?.[1] });
    if (turn !== state.turn) return; // a later zoom is under way
    state.data = data;
    if (!range) state.full = data;
    redraw();
    dress();
  }

  async function begin() {
    const first = await load({ tags: null });
    state.full = first;
    state.tags = favourites(first.tags);
    state.data = first;
    if (state.tags.some((tag) => !first.series.some((one) => one.tag === tag)) || state.range) await fetched();
    else {
      redraw();
      dress();
    }
  }

  function zoom(start, stop) {
    const { first, last } = state.full;
    const span = Math.max(4, stop - start);
    const from = Math.max(first, Math.round(start));
    const to = Math.min(last, Math.round(start + span));
    state.range = from <= first && to >= last ? null : [from, Math.max(to, from + 2)];
    hide();
    if (state.range) fetched();
    else if (state.tags.every((tag) => state.full.series.some((one) => one.tag === tag))) {
      state.turn += 1;
      state.data = state.full;
      redraw();
      dress();
    } else fetched();
  }

  function dress() {
    const { tags } = state.full;
    if (!tags.length) {
      refill(bar);
      refill(foot);
      return;
    }
    const chips = tags.slice(0, 40).map((tag) =>
      h(
        "button",
        {
          type: "button",
          class: "gs-chip",
          "aria-pressed": String(state.tags.includes(tag)),
          on: {
            click: () => {
              const next = state.tags.includes(tag) ? state.tags.filter((one) => one !== tag) : [...state.tags, tag];
              if (next.length && next.length <= 6) {
                state.tags = tags.filter((one) => next.includes(one));
                fetched();
              }
            },
          },
        },
        short(tag),
      ),
    );
    const [from, to] = state.range ?? [state.full.first, state.full.last];
    refill(
      bar,
      !compact && h("div", { class: "gs-chips", role: "group", "aria-label": t("timeline.series") }, chips),
      h("span", { class: "gs-quiet gs-push" }, t("timeline.range", { from: whole(from ?? 0), to: whole(to ?? 0) })),
      h("button", { type: "button", class: "gs-button", on: { click: () => ((state.log = !state.log), redraw(), dress()) } }, t(state.log ? "timeline.log" : "timeline.linear")),
      h("button", { type: "button", class: "gs-button", disabled: !state.range, on: { click: () => zoom(state.full.first, state.full.last) } }, t("timeline.reset")),
    );
    const looks = [...new Set(state.full.marks.flatMap((mark) => [look(mark), mark.what === "rollback" && "rollback"]).filter(Boolean))];
    refill(foot, legend(looks), h("span", { class: "gs-quiet gs-keys" }, t("timeline.keys")));
  }

  function draw(width) {
    if (!state.data) return;
    const { full, data } = state;
    const nothing = full.first === null || full.first === undefined || !data.series.length;
    if (nothing) {
      refill(stage, h("p", { class: "gs-empty" }, t("timeline.empty")));
      return;
    }
    const [from, to] = state.range ?? [full.first, full.last];
    const right = width - RIGHT;
    const x = linear(from, Math.max(to, from + 1), LEFT, right);
    const chosen = state.tags.map((tag) => data.series.find((one) => one.tag === tag)).filter(Boolean);
    const bottom = LANE + chosen.length * (PANEL + GAP);
    const height = bottom + 22 + (compact ? 0 : STRIP + 16);
    const groups = clusters(data.marks, x, right);
    const panels = chosen.map((one, k) => panel(one, LANE + GAP + k * (PANEL + GAP), x, from, to, right));
    const clip = `gs-clip-${(serial += 1)}`;
    const cursor = s("g", { class: "gs-cursor" });
    const brush = s("rect", { class: "gs-brush", y: LANE, height: bottom - LANE, width: 0 });
    const svg = s(
      "svg",
      { width, height, class: "gs-plot", role: "img", "aria-label": t("timeline.aria") },
      s("clipPath", { id: clip }, s("rect", { x: LEFT, y: 0, width: Math.max(1, right - LEFT), height: bottom })),
      panels.map((one) => one.frame),
      x.ticks(Math.max(3, Math.floor(width / 130))).filter(Number.isInteger).map((value) =>
        s("text", { class: "gs-axis", x: x.place(value), y: bottom + 15, "text-anchor": "middle" }, whole(value)),
      ),
      groups.map((one) => s("line", { class: `gs-thread gs-${one.look}`, x1: one.at, x2: one.at, y1: LANE - 8, y2: bottom })),
      s("g", { "clip-path": `url(#${clip})` }, panels.map((one) => one.body)),
      s("text", { class: "gs-axis", x: LEFT - 8, y: LANE - 14, "text-anchor": "end" }, t("timeline.events")),
      brush,
      cursor,
      groups.map((one) => flag(one)),
      !compact && strip(full, bottom + 30, right, width),
    );
    view = { x, panels, groups, cursor, brush, from, to, right, bottom, height, width };
    refill(stage, svg);
    if (state.cursor !== null) point(state.cursor, false);
  }

  function panel(one, top, x, from, to, right) {
    const points = within(one.points, from, to);
    const inner = points.filter((point) => point[0] >= from && point[0] <= to);
    const y = vertical([{ points: inner.length ? inner : points }], state.log, top + 4, top + PANEL - 6);
    const name = y.log === state.log ? short(one.tag) : `${short(one.tag)} (${t("timeline.linear_only")})`;
    return {
      one,
      y,
      frame: s(
        "g",
        null,
        grid(y, LEFT, right, 4),
        s("text", { class: "gs-panel-title", x: LEFT, y: top - 7 }, name),
      ),
      body: curve(points, x, y, top),
    };
  }

  function flag(group) {
    const many = group.marks.length > 1;
    const target = group.marks.find((mark) => mark.incident)?.incident ?? null;
    const props = { class: `gs-flag${group.marks.some((mark) => mark.incident && mark.incident === here) ? " gs-here" : ""}`, transform: `translate(${group.at.toFixed(1)} ${LANE - 18})` };
    const title = s("title", null, group.marks.slice(0, 8).map(told).join("\n") + (group.marks.length > 8 ? "\n…" : ""));
      const back = group.marks.some((mark) => mark.what === "rollback");
    const arrow = back && s("g", { transform: "translate(0 12)" }, shape("rollback", 3.6));
    const body = [title, s("circle", { r: 12, class: "gs-flag-hit" }), shape(group.look, 6.5), arrow, many && s("text", { class: "gs-flag-count", x: 9, y: -5 }, String(group.marks.length))];
    if (!target) return s("g", props, body);
    return s("g", { ...props, class: `${props.class} gs-open`, on: { click: () => (many && state.full.last > 8 ? zoomTo(group) : open(target)) } }, body);
  }

  function zoomTo(group) {
    const places = group.marks.map((mark) => mark.iteration);
    const [low, high] = [Math.min(...places), Math.max(...places)];
    if (high === low || (view.to - view.from) < 12) open(group.marks.find((mark) => mark.incident).incident);
    else zoom(low - (high - low) * 0.3 - 1, high + (high - low) * 0.3 + 1);
  }

  function strip(full, top, right, width) {
    const base = full.series.find((one) => favourites(full.tags).includes(one.tag)) ?? full.series[0];
    const x = linear(full.first, Math.max(full.last, full.first + 1), LEFT, right);
    const y = vertical([base], state.log, top + 4, top + STRIP - 4);
    const [from, to] = state.range ?? [full.first, full.last];
    const [a, b] = [x.place(from), x.place(to)];
    return s(
      "g",
      { class: "gs-strip", "data-part": "strip" },
      s("rect", { class: "gs-strip-back", x: LEFT, y: top, width: right - LEFT, height: STRIP, rx: 4 }),
      curve(base.points, x, y, top),
      full.marks.filter(look).map((mark) => s("line", { class: `gs-thread gs-${look(mark)}`, x1: x.place(mark.iteration), x2: x.place(mark.iteration), y1: top, y2: top + STRIP })),
      state.range && s("path", { class: "gs-strip-shade", d: `M${LEFT} ${top}H${a}V${top + STRIP}H${LEFT}ZM${b} ${top}H${right}V${top + STRIP}H${b}Z` }),
      s("rect", { class: "gs-strip-window", x: a, y: top + 0.5, width: Math.max(3, b - a), height: STRIP - 1, rx: 4 }),
    );
  }

  function hide() {
    state.cursor = null;
    tip.hidden = true;
    view?.cursor.replaceChildren();
  }

  function point(iteration, aloud) {
    const { x, panels, groups, cursor, right, bottom } = view;
    const at = Math.round(Math.min(view.to, Math.max(view.from, iteration)));
    state.cursor = at;
    const rows = panels.map(({ one, y }) => ({ one, y, value: nearest(one.points, at) })).filter((row) => row.value);
    const place = rows.length ? rows[0].value[0] : at;
    const px = x.place(place);
    refill(
      cursor,
      s("line", { x1: px, x2: px, y1: LANE - 8, y2: bottom }),
      rows.map(({ y, value }) => typeof value[3] === "number" && s("circle", { cx: x.place(value[0]), cy: y.place(value[3]), r: 3.5 })),
    );
    const close = groups.filter((group) => Math.abs(group.at - px) < 9).flatMap((group) => group.marks);
    refill(
      tip,
      h("strong", null, t("timeline.at", { iteration: whole(place) })),
      rows.map(({ one, value }) => h("div", { class: "gs-tip-row" }, h("span", null, short(one.tag)), h("span", { class: "gs-num" }, told4(value)))),
      close.slice(0, 5).map((mark) => h("div", { class: "gs-tip-mark" }, told(mark))),
    );
    tip.hidden = false;
    const side = px > (LEFT + right) / 2;
    tip.style.setProperty("left", side ? "auto" : `${px + 14}px`);
    tip.style.setProperty("right", side ? `${view.width - px + 14}px` : "auto");
    if (aloud) said.textContent = tip.textContent;
  }

  function place(event) {
    const box = stage.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  stage.addEventListener("pointermove", (event) => {
    if (!view || !stage.contains(event.target)) return;
    const [px, py] = place(event);
    if (state.drag) {
      drag(px);
      return;
    }
    if (py < view.bottom + 4 && px >= LEFT - 6 && px <= view.right + 6) point(view.x.value(px), false);
    else hide();
  });
  stage.addEventListener("pointerleave", () => !state.drag && hide());
  stage.addEventListener("pointerdown", (event) => {
    if (!view || event.button !== 0 || event.target.closest(".gs-open")) return;
    const [px, py] = place(event);
    const inStrip = py > view.bottom + 24;
    const whole_ = linear(state.full.first, Math.max(state.full.last, state.full.first + 1), LEFT, view.right);
    const scale = inStrip ? whole_ : view.x;
    const moving = inStrip && state.range && px > whole_.place(state.range[0]) && px < whole_.place(state.range[1]);
    state.drag = { from: px, to: px, scale, moving, range: state.range };
    stage.setPointerCapture(event.pointerId);
    hide();
  });
  function drag(px) {
    const one = state.drag;
    one.to = Math.min(view.right, Math.max(LEFT, px));
    if (one.moving || one.scale !== view.x) return; // shown when it is let go
    view.brush.setAttribute("x", Math.min(one.from, one.to));
    view.brush.setAttribute("width", Math.abs(one.to - one.from));
  }
  const letGo = () => {
    const one = state.drag;
    state.drag = null;
    if (!one || !view) return;
    view.brush.setAttribute("width", 0);
    if (Math.abs(one.to - one.from) < 5) return;
    if (one.moving) {
      const shift = one.scale.value(one.to) - one.scale.value(one.from);
      zoom(one.range[0] + shift, one.range[1] + shift);
    } else zoom(one.scale.value(Math.min(one.from, one.to)), one.scale.value(Math.max(one.from, one.to)));
  };
  stage.addEventListener("pointerup", letGo);
  stage.addEventListener("pointercancel", () => (state.drag = null));
  stage.addEventListener("dblclick", () => state.full && zoom(state.full.first, state.full.last));
  stage.addEventListener("blur", hide);
  stage.addEventListener("keydown", (event) => {
    if (!view || event.ctrlKey || event.metaKey || event.altKey) return;
    const { from, to } = view;
    const now = state.cursor ?? Math.round((from + to) / 2);
    const stride = Math.max(1, Math.round((to - from) / 100)) * (event.shiftKey ? 10 : 1);
    const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    const moved = { ArrowLeft: now - stride, ArrowRight: now + stride, Home: from, End: to }[event.key];
    if (moved !== undefined) point(moved, true);
    else if (factor) {
      const span = (to - from) * factor;
      zoom(now - span / 2, now + span / 2);
    } else if (event.key === "0" || event.key === "Escape") zoom(state.full.first, state.full.last);
    else if (event.key === "PageDown" || event.key === "PageUp") {
      const places = [...new Set(state.data.marks.filter(look).map((mark) => mark.iteration))].sort((a, b) => a - b);
      const next = event.key === "PageDown" ? places.find((one) => one > now) : places.reverse().find((one) => one < now);
      if (next !== undefined) point(next, true);
    } else if (event.key === "Enter") {
      const mark = state.data.marks.filter((one) => one.incident).sort((a, b) => Math.abs(a.iteration - now) - Math.abs(b.iteration - now))[0];
      if (mark && Math.abs(mark.iteration - now) <= Math.max(2, (to - from) / 50)) open(mark.incident);
    } else return;
    event.preventDefault();
  });

  root.ready = begin().catch((error) => refill(stage, h("p", { class: "gs-empty" }, t("error.timeline", { why: error.message }))));
  root.refresh = () => (state.range ? fetched() : begin());
  return root;
}

let serial = 0;

/** A tag as it is read: what all tags have in front says nothing. */
function short(tag) {
  return label("tag", tag.replace(/^gradsentinel\//, ""));
}

function told4([, low, high, last, odd]) {
  const also = odd?.length ? `, ${odd.map(number).join(", ")}` : "";
  return (low === high || low === null) && !also ? number(last) : `${number(last)}  (${number(low)} … ${number(high)}${also})`;
}

function told(mark) {
  const what = mark.incident ? label("kind", mark.kind) : label("mark", mark.what);
  const end = mark.incident && mark.outcome ? ` → ${label("outcome", mark.outcome)}` : "";
  return `${t("step", { step: whole(mark.step ?? mark.iteration) })}: ${what}${end}`;
}

/** Marks that would lie on one another, together; the gravest gives the look. */
function clusters(marks, x, right) {
  const placed = marks
    .map((mark) => ({ mark, look: look(mark), at: x.place(mark.iteration) }))
    .filter((one) => one.look && one.at >= LEFT - 1 && one.at <= right + 1)
    .sort((a, b) => a.at - b.at);
  const found = [];
  for (const one of placed) {
    const last = found[found.length - 1];
    if (last && one.at - last.start < CLOSE) {
      last.marks.push(one.mark);
      if (gravity(one.look) < gravity(last.look)) Object.assign(last, { look: one.look, at: one.at });
    } else found.push({ at: one.at, start: one.at, look: one.look, marks: [one.mark] });
  }
  return found;
}

