// The columns of a run file as typed arrays: when each action of a device began and ended.

/** The kinds of actions by their letters, in the order of a micro-batch's life; then those of transfers, and of what
 * compute waits for. */
const KINDS = [
  { letter: "F", name: "forward", color: "--forward" },
  { letter: "R", name: "recompute", color: "--recompute" },
  { letter: "B", name: "backward", color: "--backward" },
  { letter: "I", name: "input gradient", color: "--input-gradient" },
  { letter: "W", name: "weight gradient", color: "--weight-gradient" },
  { letter: "f", name: "weights to the device", color: "--fetch" },
  { letter: "h", name: "offload gradients", color: "--offload-gradients" },
  { letter: "s", name: "optimizer state in", color: "--state-in" },
  { letter: "t", name: "weights and optimizer state out", color: "--state-out" },
  { letter: "o", name: "boundary out", color: "--boundary-out" },
  { letter: "i", name: "boundary in", color: "--boundary-in" },
  { letter: "u", name: "boundary's gradient out", color: "--boundary-gradient-out" },
  { letter: "d", name: "boundary's gradient in", color: "--boundary-gradient-in" },
  { letter: "w", name: "waits for weights", awaited: "weights", color: "--await-weights" },
  { letter: "b", name: "waits for boundaries", awaited: "boundaries", color: "--await-boundary" },
  { letter: "g", name: "waits for gradient memory", awaited: "gradient memory", color: "--await-room" },
  { letter: "p", name: "waits for optimizer state", awaited: "optimizer state", color: "--await-update" },
];
/** By the letters' codes. */
const KIND_OF_LETTER = new Uint8Array(128);
KINDS.forEach(({ letter }, index) => { KIND_OF_LETTER[letter.charCodeAt(0)] = index; });

/** A step of the run file, ready to be drawn: a lane for each device, and a row for each lane and each way
 * of its host link. */
function decoded(timeline) {
  const lanes = timeline.lanes.map((lane) => decodedLane(lane, timeline));
  const word = timeline.stages === lanes.length ? "stage" : "device";
  const rows = lanes.flatMap((lane, d) => {
    lane.title = `${word} ${d}`;
    lane.short = String(d);
    const ways = [["in", "↓", lane.inward], ["out", "↑", lane.outward]];
    return [lane, ...ways.filter(([, , way]) => way).map(([title, short, way]) => ({ ...way, title, short }))];
  });
  return { ...timeline, lanes, rows };
}

/** When each entry of these columns began and ended. */
function decodedTimes({ kinds, waits, times }, resolution) {
  const count = kinds.length;
  const decodedKinds = new Uint8Array(count);
  const [starts, ends] = [new Float64Array(count), new Float64Array(count)];
  let now = 0;
  for (let i = 0; i < count; i++) {
    now += waits[i];
    starts[i] = now * resolution;
    now += times[i];
    ends[i] = now * resolution;
    decodedKinds[i] = KIND_OF_LETTER[kinds.charCodeAt(i)];
  }
  return { count, starts, ends, kinds: decodedKinds };
}

function decodedLane(lane, { resolution, lanes }) {
  const stage = (i) => lane.stages[lane.stages.length === 1 ? 0 : i];
  const decoded = {
    ...decodedTimes(lane, resolution),
    busy: lane.busy,
    idle: lane.idle,
    peakBytes: lane.peak_bytes,
    bytes: lane.bytes,
    microBatches: lane.micro_batches,
    stage,
    waits: decodedTimes(lane.awaited ?? { kinds: "", waits: [], times: [] }, resolution),
    inward: decodedWay(lane.inward, resolution),
    outward: decodedWay(lane.outward, resolution),
    label: (i) => String(lane.micro_batches[i]),
    /** Those that it holds. */
    stages: [...new Set(lane.stages)].sort((a, b) => a - b),
    /** Which of the device's stages it is, in the order of the model. */
    turn: (i) => Math.floor(stage(i) / lanes.length),
  };
  decoded.awaited = (i) => awaited(decoded, i);
  return decoded;
}

/** One way of a device's host link; none without transfers. */
function decodedWay(way, resolution) {
  if (!way) return null;
  const boundary = (i) => (way.micro_batches[i] === null ? "" : `.${way.micro_batches[i]}`);
  return {
    ...decodedTimes(way, resolution),
    bytes: [],
    crossed: way.bytes ?? [],
    waits: { count: 0, kinds: [] },
    microBatches: way.micro_batches,
    stage: (i) => way.stages[i],
    label: (i) => `${way.stages[i]}${boundary(i)}`,
    turn: () => 0,
    awaited: () => [],
    isHostLink: true,
  };
}

/** What compute waited for between the action before and this one, and how long. */
function awaited({ starts, ends, waits }, i) {
  const before = i > 0 ? ends[i - 1] : 0;
  return waitedFor(waits, (wait) => waits.ends[wait] > before && waits.starts[wait] < starts[i]);
}

/** How long was waited for each thing, of the waits that count. */
function waitedFor(waits, counts = () => true) {
  const sums = new Map();
  for (let wait = 0; wait < waits.count; wait++) {
    if (!counts(wait)) continue;
    const { awaited } = KINDS[waits.kinds[wait]];
    sums.set(awaited, (sums.get(awaited) ?? 0) + waits.ends[wait] - waits.starts[wait]);
  }
  return [...sums];
}

/** The first action that ends after this time. */
function firstAfter(lane, time) {
  let [low, high] = [0, lane.count];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.ends[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The action at this time, or the nearest one that is no farther than `slack`. */
function actionAt(lane, time, slack) {
  const after = firstAfter(lane, time);
  const distance = (i) => Math.max(lane.starts[i] - time, time - lane.ends[i], 0);
  const near = [after, after - 1].filter((i) => i >= 0 && i < lane.count && distance(i) <= slack);
  return near.sort((a, b) => distance(a) - distance(b))[0];
}

/** `2F0` is stage 2, forward, micro-batch 0. */
function actionName(lane, i) {
  if (lane.isHostLink) return `${lane.title} ${lane.label(i)}`;
  return `${lane.stage(i)}${KINDS[lane.kinds[i]].letter}${lane.microBatches[i]}`;
}
