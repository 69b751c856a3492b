// Layers against steps: the norm of each parameter's gradient on the way into the incident.

import { blend, diverging, sequential } from "./colours.js";
import { canvas, drawn, h, paint, refill, s } from "./dom.js";
import { finite, number, whole } from "./format.js";
import { t } from "./strings.js";

const TALLEST = 640;
const TOP = 7; // room for the first name
const NAMED = 12; // pixels a row needs for its name
const WINDOW = 44; // rows of a closer look
const ZERO = "-inf"; // the logarithm of a norm of 0: a parameter without any gradient

/** Return the picture for the contract's `heat.layers`; `incident` is the attempted step it is about. */
export function layerMap(layers, incident) {
  const names = layers?.names ?? [];
  if (!names.length || !layers.iterations?.length) return h("p", { class: "gs-empty", "data-testid": "gs-layers" }, layers?.why || t("layers.empty"));
  // What has changed tells more than what is always large, where there is enough to know the usual by.
  const state = { usual: layers.iterations.length >= 8, from: 0, to: names.length, only: false };
  const hot = new Set(layers.hot ?? []);
  const medians = layers.values.map((row) => median(row.filter(finite)));
  const stage = h("div", { class: "gs-layers-stage" });
  const said = h("p", { class: "gs-readout", "aria-live": "polite" }, t("layers.hint"));
  const bar = h("div", { class: "gs-timeline-bar" });
  const again = drawn(stage, draw);

  function rows() {
    const all = names.map((_, k) => k).slice(state.from, state.to);
    return state.only ? names.map((_, k) => k).filter((k) => hot.has(names[k])) : all;
  }

  function dress() {
    const press = (pressed, key, click) => h("button", { type: "button", class: "gs-chip", "aria-pressed": String(pressed), on: { click: () => (click(), dress(), again()) } }, t(key));
    refill(
      bar,
      h(
        "div",
        { class: "gs-chips" },
        press(state.usual, "layers.usual", () => (state.usual = true)),
        press(!state.usual, "layers.norm", () => (state.usual = false)),
      ),
      h(
        "div",
        { class: "gs-chips gs-push" },
        hot.size > 0 && hot.size < names.length && press(state.only, "layers.only", () => (state.only = !state.only)),
        state.to - state.from < names.length && press(false, "layers.all", () => ((state.from = 0), (state.to = names.length))),
      ),
    );
  }

  function draw(width) {
    const chosen = rows();
    const narrow = width < 640;
    const left = Math.min(narrow ? 130 : 330, Math.max(90, Math.max(...chosen.map((k) => names[k].length)) * 6.7 + 16));
    const per = Math.max(1, Math.ceil(chosen.length / 186)); // rows that share a line of at least 3 pixels
    const lines = [];
    for (let k = 0; k < chosen.length; k += per) lines.push(chosen.slice(k, k + per));
    const size = Math.max(3, Math.min(18, Math.floor(TALLEST / lines.length)));
    const steps = layers.iterations;
    const wide = Math.max(2, Math.min(26, (width - left - 12) / steps.length));
    const height = lines.length * size;
    const table = lines.map((line) => steps.map((_, column) => gravest(line.map((k) => (state.usual ? against(layers.values[k][column], medians[k]) : layers.values[k][column])))));
    const range = state.usual ? around(table.flat().filter(finite)) : spread(table.flat().filter(finite));
    const colours = state.usual ? diverging() : sequential();
    const gap = wide >= 6 && size >= 11 ? 1 : 0;
    const { element, context } = canvas(left + steps.length * wide + 12, height + TOP + 34, { role: "img", "aria-label": t("layers.aria", { count: names.length, steps: steps.length }) });
    context.translate(0, TOP);
    const [missing, bad, paper] = [paint("--missing"), paint("--bad"), paint("--panel")];
    table.forEach((row, k) =>
      row.forEach((value, column) => {
        const [x, y, w, tall] = [left + column * wide, k * size, wide - gap, size - gap];
        context.fillStyle = finite(value) ? blend(colours, (value - range[0]) / (range[1] - range[0] || 1)) : value === ZERO ? blend(colours, 0) : odd(value) ? bad : missing;
        context.fillRect(x, y, w, tall);
        if (odd(value) && wide >= 7 && tall >= 6) cross(context, x, y, w, tall, paper);
      }),
    );
    label(context, lines, size, left);
    axis(context, steps, incident, left, wide, height);
    const ring = s("rect", { class: "gs-ring", visibility: "hidden", width: wide + 1, height: size + 1 });
    const layer = s("svg", { class: "gs-board-svg", width: left + steps.length * wide + 12, height: height + TOP + 34 }, ring);
    const spot = (event) => {
      const box = element.getBoundingClientRect();
      const [column, line] = [Math.floor((event.clientX - box.left - left) / wide), Math.floor((event.clientY - box.top - TOP) / size)];
      return line >= 0 && line < lines.length ? { column: Math.min(steps.length - 1, Math.max(0, column)), line } : null;
    };
    const board = h("div", {
      class: "gs-board",
      tabindex: 0,
      role: "group",
      "aria-label": t("layers.aria", { count: names.length, steps: steps.length }),
      on: {
        pointermove: (event) => tell(spot(event)),
        click: (event) => closer(spot(event)),
        keydown: (event) => {
          const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
          if (event.key === "Enter") closer(now);
          if (!move) return;
          event.preventDefault();
          const old = now ?? { column: steps.length - 1, line: 0 };
          tell({ column: Math.min(steps.length - 1, Math.max(0, old.column + move[0])), line: Math.min(lines.length - 1, Math.max(0, old.line + move[1])) });
        },
      },
    });
    let now = null;
    function tell(place) {
      if (!place) return;
      now = place;
      const line = lines[place.line];
      const worst = line.find((k) => odd(layers.values[k][place.column])) ?? line[0];
      const value = layers.values[worst][place.column];
      ring.setAttribute("x", left + place.column * wide - 1);
      ring.setAttribute("y", TOP + place.line * size - 1);
      ring.setAttribute("visibility", "visible");
      const together = layers.counts?.[worst] > 1 ? ` (${t("layers.group", { count: layers.counts[worst] })})` : "";
      const more = line.length > 1 ? ` ${t("layers.more", { count: line.length - 1 })}` : "";
      const norm = finite(value) ? t("layers.value", { norm: number(10 ** value), log: value.toFixed(2) }) : value === ZERO ? t("layers.zero") : odd(value) ? number(value) : t("layers.unknown");
      refill(said, h("strong", { class: "gs-mono" }, names[worst]), `${together}${more} · ${t("timeline.at", { iteration: whole(steps[place.column]) })} · ${norm}`);
    }
    function closer(place) {
      if (!place || per === 1 && size >= NAMED) return;
      const middle = lines[place.line][0];
      state.only = false;
      state.from = Math.max(0, Math.min(names.length - WINDOW, middle - WINDOW / 2));
      state.to = Math.min(names.length, state.from + WINDOW);
      dress();
      again();
    }
    board.append(element, layer);
    refill(stage, board, legend(colours, range, table.flat(), state.usual));
  }

  function label(context, lines, size, left) {
    const font = getComputedStyle(document.body).getPropertyValue("--mono") || "monospace";
    context.textBaseline = "middle";
    context.textAlign = "right";
    let free = -Infinity;
    lines.forEach((line, k) => {
      const special = line.find((one) => hot.has(names[one]));
      const y = k * size + size / 2;
      const named = size >= NAMED - 1;
      // Where rows are thin, a name goes where there is room, those that are hot first.
      if (!named && (y - free < 13 || (special === undefined && hot.size && nearHot(lines, k, size)))) return;
      free = y;
      context.font = `${special !== undefined ? "600 " : ""}${named ? Math.min(11, size) : 10}px ${font}`;
      context.fillStyle = paint(special !== undefined ? "--bad" : named ? "--ink-2" : "--ink-3");
      context.fillText(tail(names[special ?? line[0]], Math.floor((left - 16) / 6.3)), left - 8, y + 0.5);
      if (special !== undefined) context.fillRect(left - 5, k * size, 3, Math.max(2, size - 1));
    });
  }

  function nearHot(lines, k, size) {
    for (let other = k + 1; other < Math.min(lines.length, k + 13 / size); other += 1) if (lines[other].some((one) => hot.has(names[one]))) return true;
    return false;
  }

  dress();
  return h("div", { "data-testid": "gs-layers" }, bar, h("div", { class: "gs-scroll" }, stage), said);
}

function axis(context, steps, incident, left, wide, height) {
  context.font = "10.5px system-ui, sans-serif";
  context.textBaseline = "top";
  context.fillStyle = paint("--ink-2");
  const every = Math.max(1, Math.ceil(52 / wide));
  for (let column = steps.length - 1; column >= 0; column -= every) {
    context.textAlign = "center";
    const x = left + (column + 0.5) * wide;
    context.fillRect(x - 0.5, height + 2, 1, 4);
    context.fillText(whole(steps[column]), x, height + 8);
  }
  const at = steps.indexOf(incident);
  if (at >= 0) {
    context.strokeStyle = paint("--bad");
    context.lineWidth = 1.5;
    context.strokeRect(left + at * wide - 1, 0.75, wide + 1, height - 1.5);
    context.fillStyle = paint("--bad");
    context.textAlign = left + (at + 0.5) * wide > left + steps.length * wide - 40 ? "right" : "center";
    context.fillText(t("layers.here"), Math.min(left + (at + 1) * wide, left + (at + 0.5) * wide + 26), height + 21);
  }
}

function legend(colours, range, values, usual) {
  const times = number(Number((10 ** range[1]).toPrecision(2)));
  const [low, high] = usual ? [t("layers.below", { times }), t("layers.above", { times })] : [`${t("layers.small")} ${number(10 ** range[0])}`, `${number(10 ** range[1])} ${t("layers.large")}`];
  const stops = Array.from({ length: 24 }, (_, k) => s("rect", { x: k * 6, y: 0, width: 6.5, height: 10, fill: blend(colours, k / 23) }));
  return h(
    "ul",
    { class: "gs-legend" },
    h("li", null, low, s("svg", { width: 144, height: 10, "aria-hidden": "true" }, stops), high),
    values.some(odd) && h("li", null, h("span", { class: "gs-swatch gs-swatch-bad" }, "×"), t("layers.bad")),
    values.includes(null) && h("li", null, h("span", { class: "gs-swatch gs-swatch-missing" }), t("layers.unknown")),
  );
}

function odd(value) {
  return value !== null && value !== undefined && value !== ZERO && !finite(value);
}

function against(value, usual) {
  return finite(value) && usual !== null ? value - usual : value;
}

function gravest(values) {
  const bad = values.find(odd);
  if (bad !== undefined) return bad;
  const numbers = values.filter(finite);
  return numbers.length ? Math.max(...numbers) : (values.find((one) => one === ZERO) ?? null);
}

function median(values) {
  if (!values.length) return null;
  const order = [...values].sort((a, b) => a - b);
  return order[order.length >> 1];
}

/** Low and high without the outermost hundredth, so that one odd cell does not take all colours. */
function spread(values) {
  if (!values.length) return [0, 1];
  const order = [...values].sort((a, b) => a - b);
  const at = (share) => order[Math.min(order.length - 1, Math.floor(share * order.length))];
  const [low, high] = [at(0.01), at(0.99)];
  return high > low ? [low, high] : [low - 0.5, low + 0.5];
}

/** As far below as above the usual: what nearly all cells keep within, 3 to 1,000 times. */
function around(values) {
  const sizes = values.map(Math.abs).sort((a, b) => a - b);
  const most = sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(0.998 * sizes.length))] : 0;
  const reach = Math.min(3, Math.max(0.5, most));
  return [-reach, reach];
}

function cross(context, x, y, w, tall, colour) {
  const r = Math.min(w, tall) * 0.25;
  const [cx, cy] = [x + w / 2, y + tall / 2];
  context.strokeStyle = colour;
  context.lineWidth = 1.3;
  context.beginPath();
  context.moveTo(cx - r, cy - r);
  context.lineTo(cx + r, cy + r);
  context.moveTo(cx + r, cy - r);
  context.lineTo(cx - r, cy + r);
  context.stroke();
}

/** A name without its beginning, if it is too long: parameters differ at the end. */
export function tail(name, most) {
  return name.length <= most ? name : `…${name.slice(-Math.max(4, most - 1))}`;
}
