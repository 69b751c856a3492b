// Colours for numbers: readable without red or green, in print, and on dark ground.

// Cividis, thinned: from dark blue over grey to yellow; made to look alike to every kind of colour vision.
const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
// Below, at and above the usual.
const AROUND_LIGHT = ["#2166ac", "#67a9cf", "#d1e5f0", "#eceff2", "#fde0c1", "#ee9a4d", "#a84f04"];
const AROUND_DARK = ["#5aa9f0", "#3f79ab", "#2d4a63", "#28323c", "#6b4634", "#c46a3f", "#ff9a6b"];

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** Return the colour at a share of a row of colours. */
export function blend(colours, share) {
  const at = Math.min(0.99999, Math.max(0, share)) * (colours.length - 1);
  const [a, b] = [channels(colours[Math.floor(at)]), channels(colours[Math.floor(at) + 1])];
  const mix = a.map((one, k) => Math.round(one + (b[k] - one) * (at % 1)));
  return `rgb(${mix.join(",")})`;
}

/** Colours of numbers from low to high. */
export function sequential() {
  return CIVIDIS;
}

/** Colours of numbers below and above the usual. */
export function diverging() {
  return document.documentElement.dataset.tone === "dark" ? AROUND_DARK : AROUND_LIGHT;
}
