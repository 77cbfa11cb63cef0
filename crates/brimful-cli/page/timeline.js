// The timeline that people move in: what ran and what was simulated, under one scale of time.

const ZOOM = 1.5;
/** The closest look, as a part of the whole. */
const CLOSEST = 1e-6;

class Timeline {
  constructor(root, compared) {
    const panels = [["As it ran", compared.measured], ["Simulated", compared.simulated]];
    this.panels = panels.filter(([, step]) => step).map(([title, step]) => new Panel(this, title, step));
    this.whole = { from: 0, to: Math.max(...this.panels.map(({ step }) => step.makespan)) || 1 };
    this.view = this.whole;
    root.replaceChildren(...this.panels.map((panel) => panel.root));
    this.observer = new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width > 0 && width !== this.width) this.redraw(width);
    });
    this.observer.observe(root);
  }

  /** Nothing of it is used any more. */
  close() {
    this.observer.disconnect();
    hideTooltip();
  }

  /** Draws all anew, as wide as this and in the colours of now. */
  redraw(width = this.width) {
    this.width = width;
    this.theme = readTheme();
    for (const panel of this.panels) {
      panel.resize(width);
      panel.draw();
    }
  }

  draw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      for (const panel of this.panels) panel.draw();
    });
  }

  /** Looks at a part of the time, as far as there is one. */
  look(from, to) {
    const { whole } = this;
    const all = whole.to - whole.from;
    const length = Math.min(Math.max(to - from, all * CLOSEST), all);
    const start = Math.min(Math.max(from, whole.from), whole.to - length);
    this.view = { from: start, to: start + length };
    hideTooltip();
    this.draw();
  }

  zoom(factor, around = (this.view.from + this.view.to) / 2) {
    const { from, to } = this.view;
    this.look(around - (around - from) / factor, around + (to - around) / factor);
  }

  pan(share) {
    const length = (this.view.to - this.view.from) * share;
    this.look(this.view.from + length, this.view.to + length);
  }

  all() {
    this.look(this.whole.from, this.whole.to);
  }

  /** Shows where in time the pointer is, in all panels. */
  point(time) {
    for (const panel of this.panels) panel.point(time);
  }
}

/** One of the two: a heading and a canvas that listens. */
class Panel {
  constructor(timeline, title, step) {
    this.timeline = timeline;
    this.step = step;
    this.title = title;
    this.canvas = element("canvas", {
      tabindex: 0,
      role: "application",
      "aria-roledescription": "timeline",
      "aria-label": `${title}: ${this.summary()}`,
      "aria-describedby": "timeline-help",
    });
    this.cursor = element("div", { class: "cursor", hidden: "" });
    this.range = element("div", { class: "range", hidden: "" });
    this.mark = element("div", { class: "mark", hidden: "" });
    this.plot = element("div", { class: "plot" }, this.canvas, this.cursor, this.range, this.mark);
    const head = element("div", { class: "panel-head" },
      element("h3", {}, title), element("p", {}, this.summary()));
    this.root = element("div", { class: "panel" }, head, this.plot);
    listen(this);
  }

  summary() {
    const { step } = this;
    return `${time(step.makespan, step.unit)}, bubble ${percent(step.bubble)}, `
      + plural(step.micro_batches, "micro-batch", "micro-batches");
  }

  resize(width) {
    this.layout = laneLayout(this.step.rows.length, width);
    this.painter = new LanePainter(this.canvas, this.step, this.timeline.theme, this.layout);
    for (const overlay of [this.cursor, this.range]) {
      overlay.style.height = `${this.layout.height - AXIS}px`;
    }
  }

  draw() {
    const { view } = this.timeline;
    this.painter.paint(view);
    this.placeMark();
    const { left, right, pitch } = this.layout;
    Object.assign(this.canvas.dataset, { from: view.from, to: view.to, left, right, pitch });
  }

  timeAt(x) {
    const { left, right } = this.layout;
    const { from, to } = this.timeline.view;
    return from + ((x - left) / (right - left)) * (to - from);
  }

  xAt(time) {
    const { left, right } = this.layout;
    const { from, to } = this.timeline.view;
    return left + ((time - from) / (to - from)) * (right - left);
  }

  /** The action under a point of the canvas. */
  hit(x, y) {
    const { left, right, pitch } = this.layout;
    const lane = this.step.rows[Math.floor(y / pitch)];
    if (!lane || x < left || x > right) return null;
    const slack = this.timeAt(2) - this.timeAt(0);
    const i = actionAt(lane, this.timeAt(x), slack);
    return i === undefined ? null : { d: Math.floor(y / pitch), i };
  }

  point(time) {
    const x = time === null ? -1 : this.xAt(time);
    this.cursor.hidden = x < this.layout.left || x > this.layout.right;
    this.cursor.style.left = `${x}px`;
  }

  /** Selects an action: a frame around it, its figures beside it and to screen readers. */
  select(found, speak = false) {
    this.selected = found;
    this.placeMark();
    if (!found) return hideTooltip();
    const lane = this.step.rows[found.d];
    if (speak) byId("selected").textContent = `${this.title}: ${spoken(this.step, lane, found.i)}`;
    const box = this.mark.getBoundingClientRect();
    showTooltip(actionFigures(this.step, lane, found.i), box);
  }

  placeMark() {
    this.mark.hidden = !this.isSelectedInView();
    if (this.mark.hidden) return;
    const lane = this.step.rows[this.selected.d];
    const { left, right, pitch, gap } = this.layout;
    const clamp = (x) => Math.min(Math.max(x, left), right);
    const [from, to] = [lane.starts, lane.ends].map((times) => clamp(this.xAt(times[this.selected.i])));
    Object.assign(this.mark.style, {
      left: `${from - 2}px`,
      width: `${Math.max(to - from, 1) + 4}px`,
      top: `${this.selected.d * pitch - 2}px`,
      height: `${pitch - gap + 4}px`,
    });
  }

  isSelectedInView() {
    if (!this.selected) return false;
    const { d, i } = this.selected;
    const { starts, ends } = this.step.rows[d];
    return ends[i] >= this.timeline.view.from && starts[i] <= this.timeline.view.to;
  }

  /** What zooming by keys is about: the selected action, or the middle of what is seen. */
  middle() {
    const { from, to } = this.timeline.view;
    if (!this.isSelectedInView()) return (from + to) / 2;
    const { starts, ends } = this.step.rows[this.selected.d];
    return (starts[this.selected.i] + ends[this.selected.i]) / 2;
  }

  /** Goes from the selected action to a neighbour, and follows it. */
  goTo(across, down) {
    const { rows: lanes } = this.step;
    const { view } = this.timeline;
    let { d, i } = this.selected ?? { d: 0, i: firstAfter(lanes[0], view.from) - across };
    if (down !== 0) {
      const at = this.middle();
      d = Math.min(Math.max(d + down, 0), lanes.length - 1);
      i = Math.min(firstAfter(lanes[d], at), lanes[d].count - 1);
    }
    const lane = lanes[d];
    if (lane.count === 0) return;
    i = Math.min(Math.max(i + across, 0), lane.count - 1);
    const length = view.to - view.from;
    if (lane.starts[i] < view.from || lane.ends[i] > view.to) {
      const start = (lane.starts[i] + lane.ends[i] - length) / 2;
      this.timeline.look(start, start + length);
    }
    this.select({ d, i }, true);
  }
}

function actionFigures(step, lane, i) {
  const kind = KINDS[lane.kinds[i]];
  const before = i > 0 ? lane.ends[i - 1] : 0;
  const microBatch = lane.microBatches[i];
  const figures = [["stage", String(lane.stage(i))]];
  if (microBatch !== null) figures.push(["micro-batch", String(microBatch)]);
  figures.push(
    ["took", time(lane.ends[i] - lane.starts[i], step.unit)],
    ["began at", time(lane.starts[i], step.unit, 5)],
    ["idle before", time(lane.starts[i] - before, step.unit)],
  );
  for (const [name, waited] of lane.awaited(i)) figures.push([`waited for ${name}`, time(waited, step.unit)]);
  if (lane.crossed?.length > 0) figures.push(["crossed", bytes(lane.crossed[i])]);
  if (lane.bytes.length > 0) figures.push(["in use", bytes(lane.bytes[i])]);
  return { name: actionName(lane, i), kind: kind.name, color: `var(${kind.color})`, figures };
}

function spoken(step, lane, i) {
  const { name, kind, figures } = actionFigures(step, lane, i);
  return `${name}, ${kind}, ${figures.map(([term, text]) => `${term} ${text}`).join(", ")}`;
}

function showTooltip({ name, kind = "", color, figures }, box) {
  const tooltip = byId("tooltip");
  const swatch = element("span", { class: "swatch", style: `background: ${color}` });
  const head = element("strong", {}, swatch, name, element("span", {}, kind));
  tooltip.replaceChildren(head, element("dl", {}, ...figures.flatMap(described)));
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  const x = Math.min(Math.max(box.left + box.width / 2 - width / 2, 8), innerWidth - width - 8);
  const above = box.top - height - 10;
  const y = above >= 8 ? above : Math.min(box.bottom + 10, innerHeight - height - 8);
  tooltip.style.transform = `translate(${Math.max(x, 8)}px, ${y}px)`;
}

function hideTooltip() {
  byId("tooltip").hidden = true;
}
