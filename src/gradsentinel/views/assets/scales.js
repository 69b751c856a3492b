// Axes: from a number to a place, and the numbers worth writing beside it.

/** A linear axis. */
export function linear(low, high, from, to) {
  const span = high - low || 1;
  const place = (value) => from + ((value - low) / span) * (to - from);
  return { place, value: (at) => low + ((at - from) / (to - from || 1)) * span, ticks: (count) => steps(low, high, count) };
}

/** A logarithmic axis of positive numbers. */
export function logarithmic(low, high, from, to) {
  const [a, b] = [Math.log10(low), Math.log10(high)];
  const inner = linear(a, b, from, to);
  return {
    place: (value) => inner.place(Math.log10(value)),
    value: (at) => 10 ** inner.value(at),
    ticks: (count) => decades(low, high, count),
  };
}

/** Round numbers between low and high. */
export function steps(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) found.push(Number((k * step).toPrecision(12)));
  return found;
}

function decades(low, high, count) {
  const [a, b] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const every = Math.max(1, Math.ceil((b - a) / Math.max(1, count)));
  for (const factors of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 7]]) {
    const found = [];
    for (let power = a; power <= b; power += factors.length > 1 ? 1 : every) {
      for (const factor of factors) {
        const value = Number((factor * 10 ** power).toPrecision(6));
        if (value >= low * 0.9999 && value <= high * 1.0001) found.push(value);
      }
    }
    if (found.length >= Math.min(3, count) && found.length <= count + 3) return found;
  }
  return steps(low, high, count);
}

/** Low and high of the numbers, or null without any. */
export function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}
