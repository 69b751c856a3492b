// Pieces that several pages are made of.

import { h } from "./dom.js";
import { t } from "./strings.js";

/** A titled part of a page. */
export function card(title, body, { note = null, aside = null, wide = false, tone = null, id = null } = {}) {
  return h(
    "section",
    { class: `gs-card${wide ? " gs-wide" : ""}${tone ? ` gs-card-${tone}` : ""}`, id },
    h("header", { class: "gs-card-head" }, h("h2", null, title), aside),
    note && h("p", { class: "gs-note" }, note),
    body,
  );
}

/** One number and what it is. */
export function tile(value, name, note = null, tone = null) {
  return h(
    "div",
    { class: `gs-tile${tone ? ` gs-tile-${tone}` : ""}` },
    h("div", { class: "gs-tile-name" }, name),
    h("div", { class: "gs-tile-value" }, value),
    note && h("div", { class: "gs-tile-note" }, note),
  );
}

/** Names and values, one row each; rows without a value are left out. */
export function facts(rows) {
  const told = rows.filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== "–");
  return h("dl", { class: "gs-facts" }, told.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
}

/** Counts as bars, the largest first. */
export function bars(counts, name) {
  const rows = Object.entries(counts ?? {}).filter(([, count]) => count > 0).sort((a, b) => b[1] - a[1]);
  if (!rows.length) return h("p", { class: "gs-empty" }, t("nothing"));
  const most = rows[0][1];
  return h(
    "ul",
    { class: "gs-bars" },
    rows.map(([key, count]) =>
      h(
        "li",
        null,
        h("span", { class: "gs-bar-name" }, name(key)),
        h("span", { class: "gs-bar-track" }, h("span", { class: "gs-bar-fill", style: { width: `${(100 * count) / most}%` } })),
        h("span", { class: "gs-num" }, String(count)),
      ),
    ),
  );
}

/** A line for the shell, with a button that copies it. */
export function command(what, line) {
  const button = h("button", { type: "button", class: "gs-button gs-copy", "aria-label": t("copy.aria", { what }) }, t("copy"));
  const words = line.split(" ").map((word, k) => [k > 0 && " ", h("span", null, word)]); // lines break between words
  const code = h("code", null, words);
  button.addEventListener("click", async () => {
    const done = await copied(line, code);
    button.textContent = t(done ? "copy.done" : "copy.failed");
    setTimeout(() => (button.textContent = t("copy")), 1600);
  });
  return h("li", { class: "gs-command" }, h("div", { class: "gs-command-what" }, what), h("div", { class: "gs-command-line" }, code, button));
}

async function copied(text, element) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without the clipboard, as in a frame or a file: the old way, and at least the line is selected then.
    const range = document.createRange();
    range.selectNodeContents(element);
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    return document.execCommand("copy");
  }
}

/** A sentence for a page that has nothing to show. */
export function empty(text, more = null) {
  return h("div", { class: "gs-nothing" }, h("p", null, text), more && h("p", { class: "gs-quiet" }, more));
}
