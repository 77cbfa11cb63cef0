// What pointer, wheel and keys do to a panel of the timeline.

/** A drag of fewer pixels is a click. */
const DRAG = 5;

function listen(panel) {
  const { canvas } = panel;
  const pointers = new Map();
  let dragFrom = null;
  let moved = false;

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };

  canvas.addEventListener("pointerdown", (event) => {
    const at = place(event);
    pointers.set(event.pointerId, at);
    moved = false;
    if (event.pointerType !== "mouse" || event.button !== 0) return;
    dragFrom = at.x;
    canvas.setPointerCapture(event.pointerId);
  });

  canvas.addEventListener("pointermove", (event) => {
    const at = place(event);
    if (event.pointerType === "touch") {
      moved = true;
      return moveTouch(panel, pointers, event.pointerId, at);
    }
    panel.timeline.point(panel.timeAt(at.x));
    if (dragFrom !== null && Math.abs(at.x - dragFrom) >= DRAG) {
      panel.select(null);
      return showRange(panel, dragFrom, at.x);
    }
    panel.select(panel.hit(at.x, at.y));
  });

  canvas.addEventListener("pointerup", (event) => {
    const at = place(event);
    pointers.delete(event.pointerId);
    panel.range.hidden = true;
    if (event.pointerType === "touch") return panel.select(moved ? null : panel.hit(at.x, at.y));
    const [from, to] = [dragFrom, at.x].sort((a, b) => a - b);
    if (dragFrom !== null && to - from >= DRAG) {
      panel.timeline.look(panel.timeAt(from), panel.timeAt(to));
    }
    dragFrom = null;
  });

  canvas.addEventListener("pointercancel", (event) => {
    pointers.delete(event.pointerId);
    panel.range.hidden = true;
    dragFrom = null;
  });

  canvas.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "touch") return;
    panel.timeline.point(null);
    panel.select(null);
  });

  canvas.addEventListener("dblclick", () => panel.timeline.all());
  canvas.addEventListener("wheel", (event) => wheel(panel, event, place(event)), { passive: false });
  canvas.addEventListener("keydown", (event) => key(panel, event));
  canvas.addEventListener("blur", () => panel.select(null));
}

function showRange(panel, a, b) {
  const { left, right } = panel.layout;
  const [from, to] = [a, b].sort((x, y) => x - y).map((x) => Math.min(Math.max(x, left), right));
  panel.range.hidden = false;
  Object.assign(panel.range.style, { left: `${from}px`, width: `${to - from}px` });
}

/** One finger moves; two stretch. */
function moveTouch(panel, pointers, id, at) {
  const before = pointers.get(id);
  if (!before) return;
  const other = [...pointers].find(([key]) => key !== id)?.[1];
  pointers.set(id, at);
  const { timeline } = panel;
  if (!other) {
    const moved = panel.timeAt(before.x) - panel.timeAt(at.x);
    timeline.look(timeline.view.from + moved, timeline.view.to + moved);
    return;
  }
  const middle = panel.timeAt((at.x + other.x) / 2);
  const distance = (point) => Math.max(Math.abs(point.x - other.x), 10);
  timeline.zoom(distance(at) / distance(before), middle);
}

/** Left to the page's own scrolling, unless the timeline is meant. */
function wheel(panel, event, at) {
  const { timeline } = panel;
  const isMeant = event.ctrlKey || event.metaKey || document.activeElement === panel.canvas;
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    event.preventDefault();
    timeline.pan(event.deltaX / 1000);
  } else if (isMeant) {
    event.preventDefault();
    timeline.zoom(ZOOM ** (-event.deltaY / 100), panel.timeAt(at.x));
  }
}

function key(panel, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { timeline } = panel;
  const actions = {
    ArrowLeft: () => (event.shiftKey ? panel.goTo(-1, 0) : timeline.pan(-0.2)),
    ArrowRight: () => (event.shiftKey ? panel.goTo(1, 0) : timeline.pan(0.2)),
    ArrowUp: event.shiftKey && (() => panel.goTo(0, -1)),
    ArrowDown: event.shiftKey && (() => panel.goTo(0, 1)),
    "+": () => timeline.zoom(ZOOM, panel.middle()),
    "=": () => timeline.zoom(ZOOM, panel.middle()),
    "-": () => timeline.zoom(1 / ZOOM, panel.middle()),
    0: () => timeline.all(),
    Home: () => timeline.all(),
    Escape: () => panel.select(null),
  };
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}
