// The columns of a run file as typed arrays: when each action of a device began and ended.

/** The kinds of actions by their letters, in the order of a micro-batch's life. */
const KINDS = [
  { letter: "F", name: "forward", color: "--forward" },
  { letter: "R", name: "recompute", color: "--recompute" },
  { letter: "B", name: "backward", color: "--backward" },
  { letter: "I", name: "input gradient", color: "--input-gradient" },
  { letter: "W", name: "weight gradient", color: "--weight-gradient" },
];
/** By the letters' codes. */
const KIND_OF_LETTER = new Uint8Array(128);
KINDS.forEach(({ letter }, index) => { KIND_OF_LETTER[letter.charCodeAt(0)] = index; });

/** A step of the run file, ready to be drawn. */
function decoded(timeline) {
  return { ...timeline, lanes: timeline.lanes.map((lane) => decodedLane(lane, timeline)) };
}

function decodedLane(lane, { resolution, lanes }) {
  const count = lane.kinds.length;
  const starts = new Float64Array(count);
  const ends = new Float64Array(count);
  const kinds = new Uint8Array(count);
  let now = 0;
  for (let i = 0; i < count; i++) {
    now += lane.waits[i];
    starts[i] = now * resolution;
    now += lane.times[i];
    ends[i] = now * resolution;
    kinds[i] = KIND_OF_LETTER[lane.kinds.charCodeAt(i)];
  }
  const stage = (i) => lane.stages[lane.stages.length === 1 ? 0 : i];
  return {
    busy: lane.busy,
    idle: lane.idle,
    peakBytes: lane.peak_bytes,
    bytes: lane.bytes,
    microBatches: lane.micro_batches,
    count,
    starts,
    ends,
    stage,
    kinds,
    /** Those that it holds. */
    stages: [...new Set(lane.stages)].sort((a, b) => a - b),
    /** Which of the device's stages it is, in the order of the model. */
    turn: (i) => Math.floor(stage(i) / lanes.length),
  };
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
  return `${lane.stage(i)}${KINDS[lane.kinds[i]].letter}${lane.microBatches[i]}`;
}
