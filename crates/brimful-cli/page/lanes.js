// Draws a step on a canvas: a lane for each device, an axis under them.
//
// Actions that are wide enough are boxes. Of narrower ones, however many there are, each column of
// pixels shows how much of its time each kind took, one colour upon the other, and idle time above
// them: nothing is left out, and a hundred thousand actions cost no more than their sum.

const BOX = 2.5;
const AXIS = 26;
/** Stages of a device that are told apart. */
const SHADES = 4;
const LABEL_FONT = "12px";

/** Sizes in CSS pixels of a picture with so many lanes. */
function laneLayout(lanes, width) {
  const pitch = lanes > 100 ? Math.max(3, Math.floor(1200 / lanes))
    : Math.min(30, Math.max(12, Math.floor(320 / lanes)));
  const gap = pitch >= 20 ? 4 : pitch >= 8 ? 2 : 1;
  const isNarrow = width < 560;
  const left = isNarrow ? 30 : 72;
  return { pitch, gap, left, right: width - 8, height: lanes * pitch + AXIS, width, isNarrow };
}

/** The colours of the page, as it is shown now. */
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  return {
    colors: shades(KINDS.map((kind) => color(kind.color))),
    idle: color("--idle"),
    idleLine: color("--idle-line"),
    text: color("--soft"),
    muted: color("--muted"),
    line: color("--line"),
    font: style.fontFamily,
  };
}

/** The kinds' colours, and a shade deeper for each further stage of a device. */
function shades(colors) {
  return Array.from({ length: SHADES }, (_, turn) => colors.map((hex) => {
    const parts = rgb(hex).map((part) => Math.round(part * 0.74 ** turn));
    return `#${parts.map((part) => part.toString(16).padStart(2, "0")).join("")}`;
  })).flat();
}

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** White words, unless the ground is too light for them. */
function wordColor(hex) {
  const [r, g, b] = rgb(hex).map((part) => (part / 255) ** 2.2);
  const luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return 1.05 / (luminance + 0.05) > 3.4 ? "#ffffff" : "#0b1120";
}

/** A colour as the four bytes of a pixel. */
function packed(hex) {
  return new Uint32Array(Uint8Array.of(...rgb(hex), 255).buffer)[0];
}

/** Which of the shades an action has. */
function colorIndex(lane, i) {
  return Math.min(lane.turn(i), SHADES - 1) * KINDS.length + lane.kinds[i];
}

class LanePainter {
  constructor(canvas, step, theme, layout) {
    this.context = canvas.getContext("2d");
    this.step = step;
    this.theme = theme;
    this.layout = layout;
    this.ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(layout.width * this.ratio);
    canvas.height = Math.round(layout.height * this.ratio);
    canvas.style.height = `${layout.height}px`;
    this.context.scale(this.ratio, this.ratio);
    this.pixels = Math.max(1, Math.round((layout.right - layout.left) * this.ratio));
    this.rows = Math.max(1, Math.round((layout.pitch - layout.gap) * this.ratio));
    this.strip = new OffscreenCanvas(this.pixels, this.rows).getContext("2d");
    this.image = this.strip.createImageData(this.pixels, this.rows);
    this.shares = new Float32Array(SHADES * KINDS.length * this.pixels);
    this.packed = theme.colors.map(packed);
    this.words = theme.colors.map(wordColor);
    this.hatch = this.context.createPattern(hatching(theme), "repeat");
  }

  paint(view) {
    const { context, layout, step } = this;
    this.view = view;
    this.scale = (layout.right - layout.left) / (view.to - view.from);
    context.clearRect(0, 0, layout.width, layout.height);
    context.save();
    context.beginPath();
    context.rect(layout.left, 0, layout.right - layout.left, layout.height - AXIS);
    context.clip();
    step.rows.forEach((lane, d) => this.lane(lane, d));
    context.restore();
    this.names();
    this.axis();
  }

  x(time) {
    return this.layout.left + (time - this.view.from) * this.scale;
  }

  lane(lane, d) {
    const { context, layout, view, step } = this;
    const [y, height] = [d * layout.pitch, layout.pitch - layout.gap];
    const [from, to] = [Math.max(this.x(0), layout.left), Math.min(this.x(step.makespan), layout.right)];
    context.fillStyle = this.hatch;
    context.fillRect(from, y, Math.max(to - from, 0), height);
    this.waits(lane.waits, y, height);
    const boxes = [];
    let narrow = false;
    this.shares.fill(0);
    for (let i = firstAfter(lane, view.from); i < lane.count && lane.starts[i] < view.to; i++) {
      const width = (lane.ends[i] - lane.starts[i]) * this.scale;
      if (width >= BOX) {
        boxes.push(i);
      } else {
        this.mix(lane, i);
        narrow = true;
      }
    }
    if (narrow) this.stripe(y, height);
    for (const i of boxes) this.box(lane, i, y, height);
  }

  /** Lines through idle time, in the colours of what is waited for. */
  waits(waits, y, height) {
    const { context, theme, view } = this;
    const thickness = Math.max(2, Math.round(height / 4));
    const top = y + Math.round((height - thickness) / 2);
    for (let i = firstAfter(waits, view.from); i < waits.count && waits.starts[i] < view.to; i++) {
      const [from, to] = [this.x(waits.starts[i]), this.x(waits.ends[i])];
      context.fillStyle = theme.colors[waits.kinds[i]];
      context.fillRect(from, top, to - from, thickness);
    }
  }

  /** Adds an action to the columns of pixels that it covers, by how much of each. */
  mix(lane, i) {
    const toPixel = this.scale * this.ratio;
    const start = (lane.starts[i] - this.view.from) * toPixel;
    const end = Math.min((lane.ends[i] - this.view.from) * toPixel, this.pixels);
    const offset = colorIndex(lane, i) * this.pixels;
    for (let pixel = Math.max(0, Math.floor(start)); pixel < end; pixel++) {
      this.shares[offset + pixel] += Math.min(end, pixel + 1) - Math.max(start, pixel);
    }
  }

  /** Draws what was added, from the bottom up. */
  stripe(y, height) {
    const { image, shares, pixels, rows, layout } = this;
    const target = new Uint32Array(image.data.buffer).fill(0);
    for (let pixel = 0; pixel < pixels; pixel++) {
      let filled = 0;
      for (let index = 0; index < this.packed.length; index++) {
        const share = shares[index * pixels + pixel];
        if (share === 0) continue;
        const until = Math.min(filled + share * rows, rows);
        for (let row = Math.round(filled); row < Math.round(until); row++) {
          target[(rows - 1 - row) * pixels + pixel] = this.packed[index];
        }
        filled = until;
      }
    }
    this.strip.putImageData(image, 0, 0);
    this.context.imageSmoothingEnabled = false;
    const width = layout.right - layout.left;
    this.context.drawImage(this.strip.canvas, 0, 0, pixels, rows, layout.left, y, width, height);
  }

  box(lane, i, y, height) {
    const { context, theme } = this;
    const [from, to] = [this.x(lane.starts[i]), this.x(lane.ends[i])];
    // A hair between neighbours, as long as there is room for it.
    const width = to - from - (to - from > 5 ? 1 : 0);
    context.fillStyle = theme.colors[colorIndex(lane, i)];
    context.beginPath();
    context.roundRect(from, y, width, height, width > 8 && height > 8 ? 3 : 0);
    context.fill();
    const size = Math.min(12, height - 1);
    if (size < 9 || width < 10) return;
    const text = lane.label(i);
    context.font = `${size}px ${theme.font}`;
    const shown = Math.min(to, this.layout.right) - Math.max(from, this.layout.left);
    if (context.measureText(text).width + 3 > Math.min(width, shown)) return;
    const middle = (Math.max(from, this.layout.left) + Math.min(from + width, this.layout.right)) / 2;
    context.fillStyle = this.words[colorIndex(lane, i)];
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, middle, y + height / 2 + 0.5);
  }

  /** The names of devices and of the ways of their buses: of many, as many as there is room for. */
  names() {
    const { context, layout, step, theme } = this;
    const every = Math.ceil(15 / layout.pitch);
    context.font = `${LABEL_FONT} ${theme.font}`;
    context.fillStyle = theme.text;
    context.textAlign = "left";
    context.textBaseline = "middle";
    for (let d = 0; d < step.rows.length; d += every) {
      const y = d * layout.pitch + (layout.pitch - layout.gap) / 2 + 0.5;
      const { title, short, isHostLink } = step.rows[d];
      context.fillText(layout.isNarrow ? short : title, isHostLink && !layout.isNarrow ? 12 : 2, Math.max(y, 7));
    }
  }

  axis() {
    const { context, layout, theme, view, step } = this;
    const top = layout.height - AXIS;
    const [size, name] = timeUnit(view.to - view.from, step.unit);
    const room = layout.right - layout.left;
    const unit = roundStep((view.to - view.from) / Math.max(2, Math.floor(room / 90)));
    context.font = `${LABEL_FONT} ${theme.font}`;
    context.textBaseline = "alphabetic";
    for (let tick = Math.ceil(view.from / unit); tick * unit <= view.to; tick++) {
      const x = this.x(tick * unit);
      context.fillStyle = theme.line;
      context.fillRect(x - 0.5, top, 1, 6);
      const digits = Math.max(4, Math.ceil(Math.log10(view.to / unit)) + 1);
      const text = `${number((tick * unit) / size, digits)} ${name}`.trim();
      const half = context.measureText(text).width / 2;
      context.fillStyle = theme.muted;
      context.textAlign = "center";
      const middle = Math.min(Math.max(x, half + 1), layout.width - half - 1);
      context.fillText(text, middle, top + 20);
    }
  }
}

/** 1, 2 or 5 times a power of ten, not below the wish. */
function roundStep(wish) {
  const power = 10 ** Math.floor(Math.log10(wish));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= wish * 0.9999);
}

function hatching(theme) {
  const tile = new OffscreenCanvas(6, 6);
  const context = tile.getContext("2d");
  context.fillStyle = theme.idle;
  context.fillRect(0, 0, 6, 6);
  context.strokeStyle = theme.idleLine;
  context.lineWidth = 1.5;
  for (const shift of [-6, 0, 6]) {
    context.beginPath();
    context.moveTo(shift - 1, 7);
    context.lineTo(shift + 7, -1);
    context.stroke();
  }
  return tile;
}
