// What a report runs: the same pages, from data in the same file.

import { start } from "./app.js";
import { EmbeddedSource } from "./source.js";

/** Show the report; `lang` is the language it was asked for in. */
export async function main(lang) {
  const source = new EmbeddedSource(document);
  const { runs, start: first } = await source.read("about");
  if (first !== null && !location.hash) location.replace(`#/${[runs[0].name, "incident", first].map(encodeURIComponent).join("/")}`);
  await start(document.getElementById("gs-root"), source, { lang, printing: true });
}
