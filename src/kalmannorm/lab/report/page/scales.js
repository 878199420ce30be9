// From values to pixels and back, and the round numbers to write along an axis.
function linear(low, high, from, to) {
  const span = high - low || 1;
  const scale = (value) => from + ((value - low) / span) * (to - from);
  scale.invert = (pixel) => low + ((pixel - from) / (to - from)) * span;
  scale.ticks = (count) => {
    const rough = span / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
    const places = clamp(-Math.floor(Math.log10(step) + 1e-9), 0, 8);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
      found.push([i * step, format(i * step, places)]);
    }
    return found;
  };
  return scale;
}

function logarithmic(low, high, from, to) {
  const inner = linear(Math.log10(low), Math.log10(high), from, to);
  const scale = (value) => inner(Math.log10(Math.max(value, Number.MIN_VALUE)));
  scale.invert = (pixel) => 10 ** inner.invert(pixel);
  scale.ticks = (count) => {
    const decades = Math.log10(high / low);
    const factors = decades * 3 <= count ? [1, 2, 5] : [1];
    const every = Math.max(1, Math.ceil(decades / count));
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const factor of factors) {
        const value = factor * 10 ** power;
        if (value >= low * 0.999 && value <= high * 1.001 && (factors.length > 1 || power % every === 0)) {
          found.push([value, Math.abs(power) > 4 ? value.toExponential(0) : String(Number(value.toPrecision(2)))]);
        }
      }
    }
    return found.length > 1 ? found : linear(low, high, 0, 1).ticks(count);
  };
  return scale;
}

/** Lowest and highest of what is a number, with a little room around. */
function extent(values, log = false, room = 0.04) {
  const known = values.filter((value) => Number.isFinite(value) && (!log || value > 0));
  if (!known.length) return log ? [0.1, 1] : [0, 1];
  let low = known[0];
  let high = known[0];
  for (const value of known) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (log) {
    const factor = Math.max((high / low) ** room, 1.02);
    return [low / factor, high * factor];
  }
  const edge = (high - low) * room || Math.abs(high) * room || 0.5;
  return [low - edge, high + edge];
}
