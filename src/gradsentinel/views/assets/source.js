// Where the data comes from: the plugin's routes, or what is embedded in a report. Both answer alike.

import { t } from "./strings.js";

/** Data from the TensorBoard plugin. */
export class HttpSource {
  constructor(base) {
    this.base = base;
    this.live = true;
  }

  async get(route, values = {}) {
    const url = new URL(route, this.base);
    for (const [name, value] of Object.entries(values)) {
      for (const one of Array.isArray(value) ? value : [value]) {
        if (one !== null && one !== undefined) url.searchParams.append(name, one);
      }
    }
    const answer = await fetch(url, { credentials: "same-origin" });
    const data = await answer.json().catch(() => null);
    if (!answer.ok) throw new Error(data?.error ?? `HTTP ${answer.status}`);
    return data;
  }

  strings(lang) {
    return this.get(`./strings.${lang}.json`);
  }

  runs() {
    return this.get("./runs");
  }

  run(name, lang) {
    return this.get("./run", { name, lang });
  }

  timeline(name, { tags, start, stop, points } = {}) {
    return this.get("./timeline", { name, tag: tags, start, stop, points });
  }

  incidents(name, lang) {
    return this.get("./incidents", { name, lang });
  }

  incident(name, id, lang) {
    return this.get("./incident", { name, id, lang });
  }

  compare(names, tag, points) {
    return this.get("./compare", { name: names, tag, points });
  }
}

/** Data of one run, embedded in the page as JSON; large pieces are compressed and read when they are opened. */
export class EmbeddedSource {
  constructor(page) {
    this.page = page;
    this.live = false;
    this.kept = new Map();
  }

  async read(name) {
    if (!this.kept.has(name)) this.kept.set(name, this.parse(name));
    return this.kept.get(name);
  }

  async parse(name) {
    const element = [...this.page.querySelectorAll("script[data-name]")].find((one) => one.dataset.name === name);
    if (!element) throw new Error(name);
    const text = element.textContent;
    return JSON.parse(element.dataset.encoding === "gzip" ? await unpacked(text) : text);
  }

  strings(lang) {
    return this.read(`strings.${lang}`);
  }

  async runs() {
    return (await this.read("about")).runs;
  }

  run(name, lang) {
    return this.read(`run.${lang}`);
  }

  async timeline(name, what) {
    return sliced(await this.read("timeline"), what ?? {});
  }

  incidents(name, lang) {
    return this.read(`incidents.${lang}`);
  }

  async incident(name, id, lang) {
    const pages = (await this.read("about")).pages;
    if (!Object.hasOwn(pages, id)) throw new Error(t("report.no_page"));
    const [data, usual] = await Promise.all([this.read(pages[id]), this.read("ranks")]);
    const { layers, ranks, ...told } = { ...data.shared, ...data[lang] };
    return { ...told, heat: { layers, ranks: { ...ranks, cells: cellsOf(ranks, usual) } } };
  }

  async compare(names, tag) {
    const data = await this.timeline(names[0], { tags: [tag] });
    return { tag, runs: data.series.map((one) => ({ name: names[0], points: one.points })) };
  }
}

/** The cells of a map of ranks, of which the file holds what is unlike the usual. */
function cellsOf({ unlike, present }, usual) {
  const own = new Map(unlike.map((cell) => [cell.rank, cell]));
  const there = (rank) => present.some(([first, last]) => first <= rank && rank <= last);
  return usual.filter((cell) => there(cell.rank)).map((cell) => own.get(cell.rank) ?? cell);
}

/** The part of a timeline that is asked for. */
export function sliced(data, { tags, start, stop }) {
  const inside = (iteration) => (start ?? -Infinity) <= iteration && iteration <= (stop ?? Infinity);
  return {
    ...data,
    series: data.series
      .filter((one) => !tags || tags.includes(one.tag))
      .map((one) => ({ ...one, points: one.points.filter((point) => inside(point[0])) })),
    marks: data.marks.filter((one) => inside(one.iteration)),
  };
}

async function unpacked(text) {
  const packed = Uint8Array.from(atob(text.trim()), (one) => one.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}
