// Elements, made one by one: whatever comes from a run is text or an attribute value, never markup.

const SVG = "http://www.w3.org/2000/svg";
// Control characters, and those that hide or turn text around (bidi overrides, zero width).
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

/** Return text as it is seen: characters that a reader could not see are written as escapes. */
export function shown(value) {
  return String(value).replace(HIDDEN, (one) => "\\u" + one.charCodeAt(0).toString(16).padStart(4, "0"));
}

/** Make an HTML element; props are attributes, except `on` (listeners) and `style` (single properties). */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** Make an SVG element. */
export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** Replace everything inside an element. */
export function refill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "style") {
      for (const [property, setting] of Object.entries(value)) element.style.setProperty(property, setting);
    } else if (name === "href" && !String(value).startsWith("#")) {
      throw new Error("links stay on the page");
    } else if (/^on/i.test(name)) {
      throw new Error("listeners go into `on`");
    } else {
      element.setAttribute(name, value === true ? "" : shown(value));
    }
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(shown(child)));
  }
}

/** Call `draw(width)` now that the element is on the page, and whenever its width or the theme changes. */
export function drawn(element, draw) {
  let width = 0;
  const again = () => {
    if (width > 0) draw(width);
  };
  new ResizeObserver((entries) => {
    const now = Math.floor(entries[0].contentRect.width);
    if (now > 0 && Math.abs(now - width) >= 1) {
      width = now;
      again();
    }
  }).observe(element);
  const themed = () => {
    if (!element.isConnected) document.removeEventListener("gs-theme", themed);
    else {
      width = inner(element) || width; // paper is narrower, and does not wait for an observer
      again();
    }
  };
  document.addEventListener("gs-theme", themed);
  return again;
}

function inner(element) {
  const style = getComputedStyle(element);
  return Math.floor(element.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
}

/** Return a canvas of that size in CSS pixels, sharp on any screen, and its context. */
export function canvas(width, height, props) {
  const ratio = Math.min(3, window.devicePixelRatio || 1);
  const element = h("canvas", { ...props, width: Math.round(width * ratio), height: Math.round(height * ratio) });
  element.style.setProperty("width", `${width}px`);
  element.style.setProperty("height", `${height}px`);
  const context = element.getContext("2d");
  context.scale(ratio, ratio);
  return { element, context };
}

/** Return the value of a CSS variable, such as "--ink". */
export function paint(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
