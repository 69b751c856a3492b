// The shell: which run, which page, which language, which theme; the pages do the rest.

import { h, refill } from "./dom.js";
import { comparePage } from "./page_compare.js";
import { incidentPage } from "./page_incident.js";
import { incidentsPage } from "./page_incidents.js";
import { overviewPage } from "./page_overview.js";
import { safetyPage } from "./page_safety.js";
import { empty } from "./parts.js";
import { speak, t } from "./strings.js";

const PAGES = { "": overviewPage, incidents: incidentsPage, safety: safetyPage, compare: comparePage };
const EVERY = 10_000; // milliseconds between looks at a run that is under way
const MOST_PRINTED = 100;

/** Show everything that the source has inside the element; `lang` and `theme` are what to begin with. */
export async function start(root, source, { lang = null, theme = null, printing = false } = {}) {
  const app = new App(root, source, printing);
  app.lang = lang ?? kept("lang", ["en", "zh"]) ?? (/^zh/i.test(navigator.language) ? "zh" : "en");
  app.theme = theme ?? kept("theme", ["dark", "light"]) ?? "auto";
  await app.begin();
  return app;
}

class App {
  constructor(root, source, printing) {
    this.root = root;
    this.source = source;
    this.printing = printing; // true if one page may hold all of it, as in a report
    this.runs = [];
    this.run = null;
    this.turn = 0;
    this.memory = {};
    this.charts = [];
    this.seen = null;
    this.openIncident = (id) => (location.hash = this.link("incident", id));
  }

  async begin() {
    this.paint();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
    window.addEventListener("beforeprint", () => this.paint("light", true));
    window.addEventListener("afterprint", () => this.paint());
    window.addEventListener("hashchange", () => this.show());
    window.addEventListener("keydown", (event) => this.key(event));
    await this.say(this.lang);
    if (this.source.live) setInterval(() => this.look(), EVERY);
  }

  async say(lang) {
    this.lang = lang;
    speak(lang, await this.source.strings(lang));
    await this.show();
  }

  /** The address of a page. */
  link(page, id = null, run = this.run) {
    const parts = [run ?? "", page, ...(id === null ? [] : [id])].map(encodeURIComponent);
    return `#/${parts.join("/")}`;
  }

  /** What a page remembers while others are shown. */
  remembered(name, initial) {
    return (this.memory[name] ??= initial);
  }

  /** Have this called when the run has gone on. */
  refreshes(listener) {
    this.charts.push(listener);
  }

  async show() {
    const turn = (this.turn += 1);
    const [name, page = "", id] = location.hash.replace(/^#\/?/, "").split("/").map(decoded);
    this.charts = [];
    let body;
    try {
      const runs = await this.source.runs();
      if (turn !== this.turn) return;
      this.runs = runs;
      const names = runs.map((one) => one.name);
      this.run = names.includes(name) ? name : (this.run ?? names[0] ?? null);
      this.aim();
      if (this.run === null) body = empty(t("runs.none"), t("runs.none_more"));
      else if (page === "incident" && id) body = await incidentPage(this, id);
      else if (page === "all" && this.printing) body = await this.everything();
      else body = await (PAGES[page] ?? overviewPage)(this);
    } catch (error) {
      console.error(error);
      body = empty(t("error.page"), error.message);
    }
    if (turn !== this.turn) return; // another page was asked for meanwhile
    const title = h("main", { id: "gs-main", tabindex: -1 }, body);
    refill(this.root, h("a", { class: "gs-skip", href: "#gs-main", on: { click: (event) => (event.preventDefault(), title.focus()) } }, t("skip")), this.bar(page), title);
    document.title = `GradSentinel${this.run ? ` · ${this.run}` : ""}`;
    window.scrollTo(0, 0);
    this.root.dataset.page = page || "overview";
  }

  /** Go to a run. */
  choose(run, page) {
    this.run = run;
    this.aim();
    location.hash = this.link(page);
  }

  /** Let the links of the bar lead to the run in use, also while its page is still being fetched. */
  aim() {
    for (const link of this.root.querySelectorAll(".gs-top a[data-page]")) link.setAttribute("href", this.link(link.dataset.page));
  }

  bar(page) {
    const item = (key, active) => h("a", { href: this.link(key), "data-page": key, "aria-current": active ? "page" : null }, t(`nav.${key || "overview"}`));
    const several = this.runs.length > 1;
    return h(
      "header",
      { class: "gs-top" },
      h("a", { class: "gs-brand", href: this.link(""), "data-page": "" }, "GradSentinel"),
      several &&
        h(
          "select",
          { class: "gs-input gs-run-choice", "aria-label": t("runs.choose"), on: { change: (event) => this.choose(event.target.value, page === "incident" ? "incidents" : page) } },
          this.runs.map((one) => h("option", { value: one.name, selected: one.name === this.run }, one.name)),
        ),
      h("nav", { class: "gs-nav", "aria-label": t("nav.aria") }, item("", !["incidents", "incident", "safety", "compare", "all"].includes(page)), item("incidents", page === "incidents" || page === "incident"), item("safety", page === "safety"), several && item("compare", page === "compare")),
      h(
        "div",
        { class: "gs-tools" },
        h("button", { type: "button", class: "gs-button", "data-testid": "gs-lang", lang: this.lang === "zh" ? "en" : "zh-CN", "aria-label": t("lang.aria"), on: { click: () => this.toggleLanguage() } }, t("lang.other")),
        h("button", { type: "button", class: "gs-button", "data-testid": "gs-theme", "aria-label": t("theme.aria"), on: { click: () => this.toggleTheme() } }, t(`theme.${this.tone() === "dark" ? "light" : "dark"}`)),
        this.printing && page !== "all" && h("a", { class: "gs-button gs-no-narrow", href: this.link("all") }, t("print.all")),
        this.printing && h("button", { type: "button", class: "gs-button gs-no-narrow", on: { click: () => window.print() } }, t("print")),
      ),
    );
  }

  /** All of a report on one page, for printing. */
  async everything() {
    const incidents = (await this.source.incidents(this.run, this.lang)).slice(0, MOST_PRINTED);
    const pages = [await overviewPage(this), await safetyPage(this)];
    for (const one of incidents) {
      pages.push(await incidentPage(this, one.id).catch(() => null));
    }
    return h("div", { class: "gs-everything" }, pages.filter(Boolean));
  }

  toggleLanguage() {
    keep("lang", this.lang === "zh" ? "en" : "zh");
    this.memory = {};
    return this.say(this.lang === "zh" ? "en" : "zh");
  }

  toggleTheme() {
    this.theme = this.tone() === "dark" ? "light" : "dark";
    keep("theme", this.theme);
    this.paint();
    this.root.querySelector('[data-testid="gs-theme"]').textContent = t(`theme.${this.theme === "dark" ? "light" : "dark"}`);
  }

  /** The tone in use: "dark" or "light". */
  tone() {
    if (this.theme !== "auto") return this.theme;
    return surrounding() ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  }

  paint(tone = this.tone(), paper = false) {
    document.documentElement.dataset.tone = tone;
    document.documentElement.toggleAttribute("data-paper", paper);
    document.dispatchEvent(new Event("gs-theme"));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, .gs-stage, .gs-ranks, .gs-board")) return;
    const go = { p: "previous", n: "next" }[event.key];
    const target = go && this.root.querySelector(`a[data-go="${go}"]`);
    if (target) location.hash = target.getAttribute("href");
  }

  /** See whether the run has gone on, and draw what is new. */
  async look() {
    if (document.hidden) return;
    try {
      const runs = await this.source.runs();
      if (!this.run) return runs.length ? await this.show() : undefined;
      this.meet(runs);
      const now = JSON.stringify(runs.find((one) => one.name === this.run) ?? null);
      if (this.seen !== null && now !== this.seen) {
        if (this.root.dataset.page === "overview") await this.renew();
        else for (const listener of this.charts) await listener();
      }
      this.seen = now;
    } catch {
      // The server is away for a moment; the next look tries again.
    }
  }

  /** Offer the runs that have come, and no more those that are gone. */
  meet(runs) {
    const names = (all) => all.map((one) => one.name).join("\n");
    const bar = this.root.querySelector(".gs-top");
    if (!bar || names(runs) === names(this.runs)) return;
    const chosen = bar.querySelector("select:focus") !== null;
    this.runs = runs;
    const made = this.bar(this.root.dataset.page === "overview" ? "" : this.root.dataset.page);
    bar.replaceWith(made);
    if (chosen) made.querySelector("select")?.focus();
  }

  /** Look again in a moment: the server has not read everything yet. */
  soon() {
    clearTimeout(this.timer);
    if (this.source.live) this.timer = setTimeout(() => this.root.dataset.page === "overview" && this.renew(), 1500);
  }

  /** Draw the overview anew unless somebody is at work in it. */
  async renew() {
    const busy = this.root.querySelector("main :focus, .gs-tip:not([hidden])") || getSelection().toString() || this.root.querySelector(".gs-strip-shade");
    if (busy) for (const listener of this.charts) await listener();
    else {
      const at = window.scrollY;
      await this.show();
      window.scrollTo(0, at);
    }
  }
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** The tone of the page around this frame, where that may be asked: TensorBoard has a dark mode of its own. */
function surrounding() {
  try {
    const around = window.parent === window ? null : window.parent.document.body;
    return around ? (around.classList.contains("dark-mode") ? "dark" : "light") : null;
  } catch {
    return null;
  }
}

function kept(name, choices) {
  try {
    const found = localStorage.getItem(`gradsentinel.${name}`);
    return choices.includes(found) ? found : null;
  } catch {
    return null; // not allowed here
  }
}

function keep(name, value) {
  try {
    localStorage.setItem(`gradsentinel.${name}`, value);
  } catch {
    // not allowed here: it lasts as long as the page
  }
}
