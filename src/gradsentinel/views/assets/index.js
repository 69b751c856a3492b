// What TensorBoard loads into its tab.

import { start } from "./app.js";
import { HttpSource } from "./source.js";

/** Called by TensorBoard once the frame is there. */
export async function render() {
  const base = import.meta.url;
  document.querySelector("base")?.remove(); // TensorBoard's own: links to places in the page would leave it
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = new URL("./style.css", base).href;
  document.head.append(style);
  const root = document.createElement("div");
  root.className = "gs-app";
  document.body.append(root);
  await start(root, new HttpSource(base));
}
