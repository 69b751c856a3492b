// Every word of the interface: one flat table per language, one of them in use.

let table = {};
let current = "en";

/** Use this table of strings from now on. */
export function speak(lang, strings) {
  current = lang;
  table = strings;
  document.documentElement.setAttribute("lang", lang === "zh" ? "zh-CN" : lang);
}

/** The language in use: "en" or "zh". */
export function language() {
  return current;
}

/** Return the string of that key, with `{name}` replaced by values. */
export function t(key, values) {
  const text = table[key] ?? key;
  return values ? text.replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole)) : text;
}

/** Return the string for a count, in its singular or plural form: keys `key.one` and `key.many`. */
export function counted(key, count, text) {
  return t(`${key}.${count === 1 ? "one" : "many"}`, { count: text ?? String(count) });
}

/** Return the word for a value that comes from a run, such as a kind; a strange one as it is. */
export function label(group, value) {
  if (value === null || value === undefined || value === "") return "–";
  return table[`${group}.${value}`] ?? String(value).replaceAll("_", " ");
}
