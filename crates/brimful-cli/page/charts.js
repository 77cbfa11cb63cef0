// Small charts as SVG: lines over steps, memory with its limit, sizes as they were tried.

/** Draws again whenever the width changes. */
function onWidth(container, draw) {
  let drawn = 0;
  // The entry knows the width: to ask the container would lay the whole page out for each chart.
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width === 0 || width === drawn) return;
    drawn = width;
    container.replaceChildren(draw(width));
  }).observe(container);
}

/** A picture with axes, and the two ways from values to pixels. */
class Frame {
  constructor({ width, height, x, y, left = 56, label }) {
    Object.assign(this, { width, height, left, right: width - 10, top: 10, bottom: height - 24 });
    this.svg = svgElement("svg", {
      viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label,
    });
    const span = ([low, high]) => (high > low ? high - low : 1);
    this.x = (value) => this.left + ((value - x[0]) / span(x)) * (this.right - this.left);
    this.y = (value) => this.bottom - ((value - y[0]) / span(y)) * (this.bottom - this.top);
    this.xRange = x;
    this.yRange = y;
  }

  add(name, attributes, ...children) {
    const made = svgElement(name, attributes, ...children);
    this.svg.append(made);
    return made;
  }

  /** Lines across, with their values. */
  yAxis(values, text) {
    for (const value of values) {
      const y = this.y(value);
      this.add("line", { class: "grid", x1: this.left, x2: this.right, y1: y, y2: y });
      this.add("text", { x: this.left - 8, y: y + 4, "text-anchor": "end" }, text(value));
    }
  }

  /** Values below, those of them that do not come too near to the one before. */
  xAxis(values, text) {
    let end = -Infinity;
    for (const value of values) {
      const word = text(value);
      const half = 3.4 * word.length;
      const x = Math.min(Math.max(this.x(value), half), this.width - half);
      if (x - half < end + 10) continue;
      end = x + half;
      this.add("text", { x, y: this.height - 6, "text-anchor": "middle" }, word);
    }
  }

  line(points, attributes) {
    const path = thinned(points, this.right - this.left, this.xRange)
      .map(([x, y]) => `${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`).join(" ");
    return this.add("polyline", { class: "series", points: path, ...attributes });
  }
}

/** Of more points than two a pixel, the lowest and the highest of each pixel. */
function thinned(points, pixels, [from, to]) {
  if (points.length <= 2 * pixels) return points;
  const kept = [];
  let [low, high, current] = [null, null, -1];
  const flush = () => low && kept.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  for (const point of points) {
    const pixel = Math.floor(((point[0] - from) / (to - from)) * pixels);
    if (pixel !== current) {
      flush();
      [low, high, current] = [point, point, pixel];
    }
    if (point[1] < low[1]) low = point;
    if (point[1] > high[1]) high = point;
  }
  flush();
  return kept;
}

/** Round values from below the lowest to above the highest. */
function ticks([low, high], count) {
  const step = roundStep((high - low || Math.abs(high) || 1) / count);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return [low, high];
}

/** Lines over steps; with dots, those of a few values. */
function lineChart(container, { label, series, y: text, fromZero }) {
  const points = series.flatMap((one) => one.points);
  const [low, high] = extent(points.map((point) => point[1]));
  const scale = ticks([fromZero ? 0 : low, high], 4);
  const x = extent(points.map((point) => point[0]));
  onWidth(container, (width) => {
    const y = [scale[0], scale.at(-1)];
    const frame = new Frame({ width, height: 220, x, y, label });
    frame.yAxis(scale, text);
    frame.xAxis(ticks(x, 6).filter((tick) => tick >= x[0] && tick <= x[1] && Number.isInteger(tick)),
      (step) => `step ${step.toLocaleString("en")}`);
    for (const one of series) {
      frame.line(one.points, { stroke: one.color });
      // A line of one point would not be seen.
      if (!one.dots && one.points.length > 1) continue;
      for (const [step, value] of one.points) {
        frame.add("circle", { class: "dot", cx: frame.x(step), cy: frame.y(value), r: 4, fill: one.color });
      }
    }
    readable(frame, series, text);
    return frame.svg;
  });
}

/** Shows the values nearest to the pointer. */
function readable(frame, series, text) {
  const cross = frame.add("line", { class: "cross", y1: frame.top, y2: frame.bottom, visibility: "hidden" });
  const leave = () => {
    cross.setAttribute("visibility", "hidden");
    hideTooltip();
  };
  frame.svg.addEventListener("pointerleave", leave);
  frame.svg.addEventListener("pointermove", (event) => {
    const box = frame.svg.getBoundingClientRect();
    const [low, high] = frame.xRange;
    const share = (event.clientX - box.left - frame.left) / (frame.right - frame.left);
    const wanted = low + Math.min(Math.max(share, 0), 1) * (high - low);
    const nearest = series.map((one) => ({ one, point: nearestPoint(one.points, wanted) }));
    const step = nearest[0].point[0];
    const x = frame.x(step);
    for (const name of ["x1", "x2"]) cross.setAttribute(name, x);
    cross.setAttribute("visibility", "visible");
    const figures = nearest.map(({ one, point }) => [one.name, text(point[1])]);
    const at = { left: box.left + x, width: 0, top: box.top + frame.top, bottom: box.bottom };
    showTooltip({ name: `step ${step.toLocaleString("en")}`, color: series[0].color, figures }, at);
  });
}

function nearestPoint(points, x) {
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1;
    else high = middle;
  }
  const before = points[Math.max(low - 1, 0)];
  return Math.abs(before[0] - x) < Math.abs(points[low][0] - x) ? before : points[low];
}

/** What a device held, as steps from moment to moment, under its limit if that is near. */
function memoryChart(container, { label, points, range, limit, top, x: text }) {
  onWidth(container, (width) => {
    const frame = new Frame({ width, height: 104, x: range, y: [0, top], left: 2, label });
    frame.add("line", { class: "grid", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom });
    const thin = thinned(points, frame.right - frame.left, range);
    const path = thin.map(([at, value], i) => {
      const next = thin[i + 1]?.[0] ?? range[1];
      return `L${frame.x(at).toFixed(1)},${frame.y(value).toFixed(1)}H${frame.x(next).toFixed(1)}`;
    }).join("");
    const start = frame.x(points[0]?.[0] ?? range[0]);
    const area = `M${start},${frame.bottom}${path}V${frame.bottom}Z`;
    frame.add("path", { class: "area", d: area });
    frame.add("path", { class: "series", d: `M${path.slice(1)}`, stroke: "var(--forward)" });
    if (limit !== null && limit <= top) {
      const y = frame.y(limit);
      frame.add("line", { class: "limit", x1: frame.left, x2: frame.right, y1: y, y2: y });
    }
    frame.xAxis(range, text);
    return frame.svg;
  });
}

/** The sizes in the order in which they were decided on. */
function sizesChart(container, decisions) {
  const logs = decisions.map(({ size }) => Math.log2(size));
  const [low, high] = extent(logs);
  const powers = Array.from(
    { length: Math.ceil(high) - Math.floor(low) + 1 }, (_, i) => Math.floor(low) + i);
  onWidth(container, (width) => {
    const y = [powers[0] - 0.3, powers.at(-1) + 0.3];
    const label = "Micro-batch sizes in the order in which they were tried, failed and chosen";
    const frame = new Frame({ width, height: 240, x: [-0.5, decisions.length - 0.5], y, label });
    const every = Math.ceil(powers.length / 9);
    frame.yAxis(powers.filter((_, i) => i % every === 0), (power) => number(2 ** power));
    const isNew = (i) => i === 0 || decisions[i].step !== decisions[i - 1].step;
    frame.xAxis([...decisions.keys()].filter(isNew), (i) => `step ${decisions[i].step.toLocaleString("en")}`);
    frame.line(logs.map((log, i) => [i, log]), { stroke: "var(--line)" });
    decisions.forEach((decision, i) => sizeMark(frame, decision, frame.x(i), frame.y(logs[i])));
    return frame.svg;
  });
}

function sizeMark(frame, decision, x, y) {
  const { outcome } = decision;
  const mark = outcome === "failed"
    ? frame.add("path", { class: "failed", d: `M${x - 5},${y - 5}l10,10m0,-10l-10,10` })
    : frame.add("circle", { class: outcome, cx: x, cy: y, r: outcome === "chosen" ? 6 : 5 });
  const show = () => showTooltip({
    name: `${plural(decision.size, "sample")}: ${outcome}`,
    color: outcome === "failed" ? "var(--limit)" : outcome === "chosen" ? "var(--good)" : "var(--muted)",
    figures: decisionFigures(decision),
  }, mark.getBoundingClientRect());
  mark.addEventListener("pointerenter", show);
  mark.addEventListener("pointerleave", hideTooltip);
}

function decisionFigures({ step, why, predicted, measured, available }) {
  const figures = [["step", step.toLocaleString("en")], ["why", why]];
  if (predicted !== null) figures.push(["predicted", bytes(predicted)]);
  if (measured !== null) figures.push(["needed", bytes(measured)]);
  return [...figures, ["free", bytes(available)]];
}
