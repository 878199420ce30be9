// From the numbers of an axis to pixels and back. The range and the ticks come with the axis.
function scaleOf(axis, from, to) {
  const turn = axis.log ? Math.log10 : (value) => value;
  const [low, high] = [turn(axis.low), turn(axis.high)];
  const scale = (value) => from + ((turn(value) - low) / (high - low)) * (to - from);
  scale.ticks = axis.ticks.map(([value, words]) => [scale(value), words]);
  return scale;
}

/** The width of the longest of these words in pixels, about. */
function wordsWidth(words) {
  return 6.2 * Math.max(0, ...words.map((one) => one.length));
}

function ticksWidth(axis) {
  return wordsWidth(axis.ticks.map(([, words]) => words));
}
