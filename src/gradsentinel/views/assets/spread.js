// How it spread: from where it began, through modules and tensors, to the parameters that it would have spoilt.

import { drawn, h, refill, s } from "./dom.js";
import { tail } from "./heat_layers.js";
import { counted, label, t } from "./strings.js";

const BOX = 48;
const ROW = 66;
const MOST = 9;

/** Return the picture for the contract's `spread`. */
export function spreadGraph(path) {
  const nodes = path ?? [];
  if (!nodes.length) return h("p", { class: "gs-empty", "data-testid": "gs-spread" }, t("spread.empty"));
  const columns = [];
  let skipped = false; // true after a gap: stations that the diagnosis left out
  for (const node of nodes) {
    if (node.kind === "gap") {
      const before = columns[columns.length - 1];
      if (before) before.gap = Number(node.detail) || before.gap || 0;
      skipped = true;
      continue;
    }
    const last = columns[columns.length - 1];
    const own = skipped ? { ...node, after: true } : node;
    skipped = false;
    if (last && last.kind === node.kind) last.nodes.push(own);
    else columns.push({ kind: node.kind, nodes: [own] });
  }
  const root = h("div", { class: "gs-spread", "data-testid": "gs-spread", role: "list", "aria-label": t("spread.aria", { count: nodes.length }) });
  drawn(root, (width) => draw(root, columns, width));
  return root;
}

function draw(root, columns, width) {
  const across = width >= 480 ? columns.length : 1;
  const flow = across === 1 ? [{ kind: "", nodes: columns.flatMap((one) => one.nodes) }] : columns;
  const gap = width >= 800 ? 64 : 40;
  const wide = Math.min(330, (width - gap * (flow.length - 1)) / flow.length);
  const shown = flow.map((column) => column.nodes.slice(0, across === 1 ? 30 : MOST));
  const tallest = Math.max(...flow.map((column, k) => shown[k].length + (column.nodes.length > shown[k].length || column.gap ? 0.6 : 0)));
  const height = tallest * ROW - (ROW - BOX) + 4;
  const links = [];
  const boxes = [];
  const spots = flow.map((column, k) => {
    const own = shown[k].length * ROW - (ROW - BOX);
    const top = (height - own) / 2;
    return shown[k].map((node, row) => ({ x: k * (wide + gap), y: Math.max(0, top) + row * ROW, node }));
  });
  spots.forEach((column, k) => {
    column.forEach((spot, row) => {
      boxes.push(box(spot, wide, k === 0 && row === 0));
      const chain = across === 1 || ["module", "operator"].includes(spot.node.kind);
      if (row > 0 && chain) links.push(arrow(column[row - 1].x + 26, column[row - 1].y + BOX, spot.x + 26, spot.y, true, spot.node.after));
    });
    if (k > 0) {
      const before = spots[k - 1];
      const chained = ["module", "operator"].includes(before[0].node.kind);
      const from = chained ? [before[before.length - 1]] : before;
      const to = ["module", "operator"].includes(column[0].node.kind) ? [column[0]] : column;
      for (const a of from.length * to.length > 40 ? [from[0]] : from) for (const b of to) links.push(arrow(a.x + wide, a.y + BOX / 2, b.x, b.y + BOX / 2, false, b.node.after));
    }
    const more = flow[k].nodes.length - shown[k].length + (flow[k].gap ?? 0);
    if (more > 0) {
      const last = column[column.length - 1];
      boxes.push(h("p", { class: "gs-spread-more", style: { left: `${last.x}px`, top: `${last.y + BOX + 6}px`, width: `${wide}px` } }, counted("spread.more", more)));
    }
  });
  root.style.setProperty("height", `${height}px`);
  refill(root, s("svg", { class: "gs-links", width, height, "aria-hidden": "true" }, links), boxes);
}

function box({ x, y, node }, width, first) {
  const most = Math.floor((width - 28) / 7.6);
  return h(
    "div",
    {
      class: `gs-node gs-node-${["operator", "module", "tensor", "parameter"].includes(node.kind) ? node.kind : "module"}${first ? " gs-node-first" : ""}`,
      role: "listitem",
      title: [node.name, node.detail].filter(Boolean).join("\n"),
      style: { left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${BOX}px` },
    },
    h("span", { class: "gs-node-kind" }, label("node", node.kind), node.detail ? ` · ${node.detail}` : ""),
    h("span", { class: "gs-node-name" }, tail(node.name, most)),
  );
}

function arrow(x1, y1, x2, y2, down, gap = false) {
  const bend = down ? 0 : (x2 - x1) / 2;
  const line = down ? `M${x1} ${y1}V${y2 - 4}` : `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2 - 5} ${y2}`;
  const head = down ? `M${x2 - 4} ${y2 - 6}L${x2} ${y2 - 1}L${x2 + 4} ${y2 - 6}` : `M${x2 - 7} ${y2 - 4}L${x2 - 1} ${y2}L${x2 - 7} ${y2 + 4}`;
  return s("g", { class: gap ? "gs-link gs-link-gap" : "gs-link" }, s("path", { d: line }), s("path", { d: head, class: "gs-link-head" }));
}
