// Where in the job: every rank as a cell, arranged as the job is.

import { canvas, drawn, h, paint, refill, s } from "./dom.js";
import { listed, whole } from "./format.js";
import { counted, label, t } from "./strings.js";

const SINGLE = 1024; // so many cells are elements of the page; of more only the hot ones
const MOST_HOT = 512;

/** Return the picture for the contract's `heat.ranks`. */
export function rankMap(ranks) {
  const cells = ranks?.cells ?? [];
  if (!cells.length) return h("p", { class: "gs-empty" }, t("ranks.empty"));
  const stage = h("div", { class: "gs-ranks", tabindex: 0, role: "group", "aria-label": t("ranks.aria", { hot: cells.filter(isHot).length, total: whole(ranks.total ?? cells.length) }) });
  const said = h("p", { class: "gs-readout", "aria-live": "polite" }, t("ranks.hint"));
  const plan = arranged(ranks);
  let view = null;
  let chosen = null;

  function show(cell) {
    chosen = cell;
    refill(said, h("strong", null, t("rank", { rank: cell.rank })), " ", described(cell));
    view?.mark(cell);
  }

  drawn(stage, (width) => {
    view = picture(plan, width, show);
    refill(stage, view.element);
    if (chosen) view.mark(chosen);
  });
  stage.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move || !view) return;
    event.preventDefault();
    const next = chosen ? view.beside(chosen, move) : (cells.find(isHot) ?? cells[0]);
    if (next) show(next);
  });
  if (cells.length === 1) return h("div", null, h("div", { class: "gs-alone" }, stage), hotList(ranks));
  return h("div", null, stage, h("div", { class: "gs-map-foot" }, key(cells), said), hotList(ranks));
}

function isHot(cell) {
  return cell.hot > 0;
}

function described(cell) {
  const place = Object.entries(cell.coordinates ?? {}).map(([name, value]) => `${name} ${value}`);
  return [place.join(" · "), [cell.host, cell.device].filter(Boolean).join(" "), cell.why].filter(Boolean).join(" — ");
}

/** Give each cell a facet, a row and a column. */
function arranged(ranks) {
  const { cells } = ranks;
  const told = (ranks.axes ?? []).filter((axis) => axis.size > 1);
  const known = cells.filter((cell) => told.every((axis) => Number.isInteger(cell.coordinates?.[axis.name])));
  const axes = known.length > 1 ? told : [];
  if (axes.length < 2) {
    const name = axes[0]?.name ?? "rank";
    const across = cells.length <= 16 ? cells.length : cells.length <= 256 ? 16 : 2 ** Math.ceil(Math.log2(Math.sqrt(cells.length)));
    const order = [...cells].sort((a, b) => a.rank - b.rank);
    const put = order.map((cell, k) => ({ cell, column: k % across, row: Math.floor(k / across) }));
    return { facets: [{ title: "", put }], columns: across, rows: Math.ceil(cells.length / across), across: name, down: "", wrapped: order };
  }
  // Tensor parallel ranks sit side by side in a machine: a row of the picture, or a column where there are many others.
  const bySize = [...axes].sort((a, b) => b.size - a.size);
  const facetAxes = axes.length === 2 ? [] : axes.filter((axis) => axis.name === "pp" || !bySize.slice(0, 2).includes(axis));
  const inner = axes.filter((axis) => !facetAxes.includes(axis)).sort((a, b) => b.size - a.size);
  while (inner.length > 2) facetAxes.push(inner.pop());
  if (inner.length < 2) inner.push(...facetAxes.splice(facetAxes.findIndex((axis) => axis.name !== "pp"), 1));
  const [x, y] = inner;
  const facets = new Map();
  for (const cell of known) {
    const key_ = facetAxes.map((axis) => cell.coordinates[axis.name]);
    const name = key_.join("/");
    if (!facets.has(name)) facets.set(name, { key: key_, title: facetAxes.map((axis, k) => `${axis.name} ${key_[k]}`).join(" · "), put: [] });
    facets.get(name).put.push({ cell, column: cell.coordinates[x.name], row: cell.coordinates[y.name] });
  }
  const sorted = [...facets.values()].sort((a, b) => a.key.reduce((found, one, k) => found || one - b.key[k], 0));
  const others = cells.filter((cell) => !known.includes(cell));
  if (others.length) {
    const columns = Math.max(x.size, Math.ceil(others.length / y.size));
    const put = others.map((cell, k) => ({ cell, column: k % columns, row: Math.floor(k / columns) }));
    sorted.push({ title: t("ranks.elsewhere"), put });
    return { facets: sorted, columns, rows: y.size, across: x.name, down: y.name };
  }
  return { facets: sorted, columns: x.size, rows: y.size, across: x.name, down: y.name };
}

function picture(plan, width, show) {
  const total = plan.facets.reduce((sum, facet) => sum + facet.put.length, 0);
  const head = plan.facets[0].title ? 20 : 4;
  const left = plan.down ? 40 : 8;
  const below = 18;
  const largest = total <= 16 ? 46 : total <= 64 ? 34 : total <= 256 ? 24 : 18;
  // As many facets side by side as fit with cells that can be told apart.
  let best = null;
  for (let side = 1; side <= plan.facets.length; side += 1) {
    const size = Math.min(largest, (width / side - left - 16) / plan.columns);
    const lines = Math.ceil(plan.facets.length / side);
    const height = lines * (plan.rows * size + head + below);
    if (size < 3 && best) break;
    const score = Math.min(size, 16) * Math.min(1, 460 / height);
    if (!best || score >= best.score) best = { side, size: Math.max(2, size), score };
  }
  const size = Math.floor(best.size * 2) / 2;
  const gap = size >= 10 ? 2 : size >= 5 ? 1 : 0.5;
  const facetWidth = plan.columns * size + left + 16;
  const facetHeight = plan.rows * size + head + below;
  const height = Math.ceil(plan.facets.length / best.side) * facetHeight;
  const spots = new Map();
  const grid = new Map();
  plan.facets.forEach((facet, k) => {
    const [x0, y0] = [(k % best.side) * facetWidth + left, Math.floor(k / best.side) * facetHeight + head];
    for (const { cell, column, row } of facet.put) {
      const spot = { x: x0 + column * size, y: y0 + row * size, facet: k, column, row, cell };
      spots.set(cell.rank, spot);
      grid.set(`${k}/${column}/${row}`, cell);
    }
  });
  const shownWidth = Math.min(width, best.side * facetWidth);
  const board = h("div", { class: "gs-board" });
  board.style.setProperty("height", `${height}px`);
  board.style.setProperty("width", `${Math.max(shownWidth, facetWidth)}px`);
  const single = total <= SINGLE;
  const layer = s("svg", { width: Math.max(shownWidth, facetWidth), height, class: "gs-board-svg" });
  if (!single) {
    const { element, context } = canvas(Math.max(shownWidth, facetWidth), height, { class: "gs-board-canvas", "aria-hidden": "true" });
    context.fillStyle = paint("--cold");
    for (const spot of spots.values()) context.fillRect(spot.x, spot.y, size - gap, size - gap);
    board.append(element);
  }
  let hot = 0;
  for (const spot of spots.values()) {
    if (isHot(spot.cell)) hot += 1;
    else if (!single) continue;
    if (!single && isHot(spot.cell) && hot > MOST_HOT) continue;
    layer.append(cellOf(spot, size, gap, show));
  }
  if (!single && hot > MOST_HOT) drawRest(board.querySelector("canvas"), spots, size, gap);
  plan.facets.forEach((facet, k) => {
    const [x0, y0] = [(k % best.side) * facetWidth + left, Math.floor(k / best.side) * facetHeight + head];
    layer.append(...labelled(plan, facet, x0, y0, size));
  });
  const ring = s("rect", { class: "gs-ring", width: size + 2, height: size + 2, rx: Math.min(4, size / 5), visibility: "hidden" });
  layer.append(ring);
  board.append(layer);
  board.addEventListener("pointermove", (event) => {
    const box = board.getBoundingClientRect();
    const found = at(event.clientX - box.left, event.clientY - box.top);
    if (found) show(found);
  });
  function at(px, py) {
    const k = Math.floor(py / facetHeight) * best.side + Math.floor(px / facetWidth);
    const column = Math.floor((px - (k % best.side) * facetWidth - left) / size);
    const row = Math.floor((py - Math.floor(k / best.side) * facetHeight - head) / size);
    return grid.get(`${k}/${column}/${row}`) ?? null;
  }
  return {
    element: board,
    mark(cell) {
      const spot = spots.get(cell.rank);
      ring.setAttribute("x", spot.x - 1 - gap / 2);
      ring.setAttribute("y", spot.y - 1 - gap / 2);
      ring.setAttribute("visibility", "visible");
    },
    beside(cell, [dx, dy]) {
      const spot = spots.get(cell.rank);
      return grid.get(`${spot.facet}/${spot.column + dx}/${spot.row + dy}`) ?? null;
    },
  };
}

function cellOf(spot, size, gap, show) {
  const { cell } = spot;
  const hot = isHot(cell);
  const side = size - gap;
  const cross = hot && size >= 7;
  const named = cross && size >= 34; // then the cross is below the number
  const inset = side * (named ? 0.36 : 0.3);
  const drop = named ? side * 0.14 : 0;
  const box = { x: spot.x, y: spot.y, width: side, height: side, rx: Math.min(4, size / 6) };
  return s(
    "g",
    {
      "data-testid": "gs-heat-cell",
      "data-rank": cell.rank,
      "data-hot": cell.hot,
      class: hot ? "gs-cell gs-cell-hot" : "gs-cell",
      on: { click: () => show(cell) },
    },
    s("title", null, `${t("rank", { rank: cell.rank })} ${described(cell)}`),
    s("rect", { ...box, class: "gs-cell-back" }),
    hot && s("rect", { ...box, class: "gs-cell-heat", "fill-opacity": Math.max(0.45, Math.min(1, cell.hot)) }),
    cross && s("path", { class: "gs-cell-cross", d: `M${spot.x + inset} ${spot.y + inset + drop}L${spot.x + side - inset} ${spot.y + side - inset + drop}M${spot.x + side - inset} ${spot.y + inset + drop}L${spot.x + inset} ${spot.y + side - inset + drop}` }),
    size >= 24 && !cross && s("text", { x: spot.x + side / 2, y: spot.y + side / 2, dy: "0.35em", "text-anchor": "middle", class: "gs-cell-name" }, String(cell.rank)),
    named && s("text", { x: spot.x + 4, y: spot.y + 12, class: "gs-cell-name" }, String(cell.rank)),
  );
}

function drawRest(element, spots, size, gap) {
  const context = element.getContext("2d");
  context.fillStyle = paint("--hot");
  for (const spot of spots.values()) if (isHot(spot.cell)) context.fillRect(spot.x, spot.y, size - gap, size - gap);
}

function labelled(plan, facet, x0, y0, size) {
  const under = y0 + plan.rows * size + 12;
  const every = (count) => Math.max(1, 2 ** Math.ceil(Math.log2(Math.max(1, (22 / size) * (count > 99 ? 1.3 : 1)))));
  const made = [];
  const struck = facet.put.filter(({ cell }) => isHot(cell)).length;
  if (facet.title) made.push(s("text", { class: struck ? "gs-facet gs-facet-hot" : "gs-facet", x: x0, y: y0 - 7 }, facet.title, struck > 0 && s("tspan", { dx: 6, class: "gs-facet-count" }, " ", counted("ranks.struck", struck, whole(struck)))));
  if (plan.down) {
    for (let row = 0; row < plan.rows; row += every(plan.rows)) made.push(s("text", { class: "gs-axis", x: x0 - 5, y: y0 + (row + 0.5) * size, dy: "0.32em", "text-anchor": "end" }, row === 0 ? `${plan.down} 0` : String(row)));
    for (let column = 0; column < plan.columns; column += every(plan.columns)) made.push(s("text", { class: "gs-axis", x: x0 + (column + 0.5) * size - 1, y: under, "text-anchor": "middle" }, column === 0 ? `${plan.across} 0` : String(column)));
  } else if (plan.wrapped.length > 1) {
    made.push(s("text", { class: "gs-axis", x: x0, y: under }, `${plan.across} 0 … ${plan.wrapped.length - 1}`));
  }
  return made;
}

function key(cells) {
  const some = cells.some(isHot);
  return h(
    "ul",
    { class: "gs-legend" },
    some && h("li", null, h("span", { class: "gs-swatch gs-swatch-hot" }, "×"), t("ranks.hot")),
    h("li", null, h("span", { class: "gs-swatch gs-swatch-cold" }), t("ranks.cold")),
  );
}

/** The hot ranks in words, and the machines they have in common. */
function hotList(ranks) {
  const hot = ranks.cells.filter(isHot).sort((a, b) => b.hot - a.hot || a.rank - b.rank);
  if (!hot.length) return null;
  const hosts = new Map();
  for (const cell of ranks.cells) {
    if (!cell.host) continue;
    const one = hosts.get(cell.host) ?? { all: 0, hot: 0 };
    one.all += 1;
    one.hot += isHot(cell) ? 1 : 0;
    hosts.set(cell.host, one);
  }
  const struck = [...hosts].filter(([, one]) => one.hot).sort((a, b) => b[1].hot - a[1].hot);
  const same = new Set(hot.map((cell) => cell.why).filter(Boolean)).size < 2; // the headline says it then
  const rows = hot.slice(0, 8).map((cell) =>
    h(
      "tr",
      null,
      h("td", null, String(cell.rank)),
      h("td", null, Object.entries(cell.coordinates ?? {}).map(([name, value]) => `${name} ${value}`).join(" · ") || "–"),
      h("td", { class: "gs-mono" }, [cell.host, cell.device].filter(Boolean).join(" · ") || "–"),
      !same && h("td", null, cell.why || "–"),
    ),
  );
  return h(
    "div",
    null,
    struck.length > 0 &&
      hot.length > 1 &&
      h("p", null, t("ranks.hosts", { hosts: listed(struck.slice(0, 6).map(([name, one]) => t("ranks.host", { name, hot: one.hot, all: one.all }))) + (struck.length > 6 ? " …" : "") })),
    h(
      "div",
      { class: "gs-scroll" },
      h(
        "table",
        { class: "gs-table" },
        h("thead", null, h("tr", null, ["rank", "place", "host", ...(same ? [] : ["why"])].map((name) => h("th", { scope: "col" }, label("column", name))))),
        h("tbody", null, rows),
      ),
    ),
    hot.length > 8 && h("p", { class: "gs-quiet" }, counted("ranks.more", hot.length - 8)),
  );
}
