// Fills the page's sections from the run. A section without data stays hidden.

function fillHead(run) {
  byId("title").textContent = run.title;
  const ended = byId("ended");
  const steps = run.steps.number.at(-1) ?? 0;
  const after = `after ${plural(steps, "step")}`;
  if (typeof run.ended === "object") {
    ended.className = "ended failed";
    ended.textContent = `Failed ${after}: ${run.ended.failed}`;
  } else {
    ended.className = `ended ${run.ended}`;
    ended.textContent = { finished: `Finished ${after}`, stopped: `Stopped ${after}` }[run.ended]
      ?? "Simulated: nothing was run";
  }
  const facts = headFacts(run).map((fact) => element("div", {}, ...described(fact)));
  byId("facts").replaceChildren(...facts);
  byId("facts").hidden = facts.length === 0;
}

function headFacts({ steps, tests, timelines, devices }) {
  const facts = [];
  const loss = steps.loss.at(-1) ?? null;
  if (loss !== null) facts.push(["Last loss", number(loss, 4)]);
  const accuracy = tests.at(-1)?.accuracy ?? null;
  if (accuracy !== null) facts.push(["Test accuracy", percent(accuracy)]);
  if (steps.number.length > 0) {
    facts.push(["Samples/s", number(median(steps.samples_per_s), 3)]);
    facts.push(["Micro-batch size", plural(steps.micro_batch.at(-1), "sample")]);
    const retries = steps.retries.reduce((sum, count) => sum + count, 0);
    if (retries > 0) facts.push(["Retries", plural(retries, "time")]);
  }
  const step = timelines.at(-1)?.measured ?? timelines[0]?.simulated;
  if (step) {
    const word = step === timelines.at(-1).measured ? "Last step" : "Step";
    facts.push([word, time(step.makespan, step.unit, 3)], ["Bubble", percent(step.bubble)]);
  }
  const [, peak] = extent([0, ...steps.peaks.flat(), ...(step?.lanes ?? []).map((lane) => lane.peak_bytes)]);
  if (peak > 0) facts.push([devices.length > 1 ? "Peak of a device" : "Peak memory", bytes(peak)]);
  return facts;
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[sorted.length >> 1];
}

/** Buttons of which one is pressed. */
function fillChoices(container, titles, choose) {
  const buttons = titles.map((title, index) => {
    const button = element("button", { type: "button", "aria-pressed": "false" }, title);
    button.addEventListener("click", () => press(index));
    return button;
  });
  const press = (index) => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === index)));
    choose(index);
  };
  container.replaceChildren(...buttons);
  container.hidden = buttons.length < 2;
  return press;
}

function fillLegend(compared) {
  const steps = [compared.measured, compared.simulated].filter(Boolean);
  const occurs = (kind) => steps.some((step) => step.rows.some((lane) =>
    lane.kinds.includes(kind) || lane.waits.kinds.includes(kind)));
  const shown = KINDS.filter((_, kind) => occurs(kind)).map(({ name, color, awaited }) => {
    const swatch = element("span", { class: awaited ? "swatch wait" : "swatch", style: `background: var(${color})` });
    return [awaited, element("li", {}, swatch, name)];
  });
  const [entries, waits] = [false, true].map((isWait) =>
    shown.filter(([awaited]) => Boolean(awaited) === isWait).map(([, entry]) => entry));
  const idle = element("li", {}, element("span", { class: "swatch idle" }), "idle");
  if (steps.some((step) => step.stages > step.lanes.length)) {
    const swatch = element("span", { class: "swatch shades" });
    entries.push(element("li", {}, swatch, "deeper: a later stage of the device"));
  }
  byId("legend").replaceChildren(...entries, idle, ...waits);
}

function fillIdle({ measured, simulated }, devices) {
  const steps = [["as it ran", measured], ["simulated", simulated]].filter(([, step]) => step);
  const said = steps.map(([word, step]) => `${percent(step.bubble)} ${word}`).join(", ");
  byId("idle-summary").textContent = `The bubble is idle time over all time of all devices: ${said}.`
    + (measured && simulated ? " Simulated is the same schedule with each kind of action as long as"
      + " it took here on average, and transfers that take no time." : "")
    + steps.map(([word, step]) => saidWaits(word, step)).join("");
  fillHostLink(steps.map(([, step]) => step).filter(hasHostLink)[0]);
  const head = ["device", "stages",
    ...steps.flatMap(([word]) => [`busy, ${word}`, `idle, ${word}`]), "peak", "limit"];
  const isWide = (column) => column === 1 || head[column].startsWith("busy") || column >= head.length - 2;
  const cell = (name, column, content, attributes = {}) =>
    element(name, isWide(column) ? { ...attributes, class: "wide" } : attributes, content);
  const rows = steps[0][1].lanes.map((lane, d) => {
    const peak = Math.max(...steps.map(([, step]) => step.lanes[d]?.peakBytes ?? 0));
    const limit = devices[d]?.limit ?? null;
    const cells = [
      lane.stages.join(", "),
      ...steps.flatMap(([, step]) => idleCells(step, step.lanes[d])),
      peak > 0 ? bytes(peak) : "–",
      limit === null ? "–" : bytes(limit),
    ];
    return element("tr", {}, element("th", { scope: "row" }, String(d)),
      ...cells.map((content, column) => cell("td", column + 1, content)));
  });
  byId("idle-table").replaceChildren(
    element("thead", {}, element("tr", {},
      ...head.map((word, column) => cell("th", column, word, { scope: "col" })))),
    element("tbody", {}, ...rows));
}

function hasHostLink(step) {
  return step.rows.some((row) => row.isHostLink);
}

/** How long compute waited for transfers, the longest first. */
function saidWaits(word, step) {
  if (!hasHostLink(step)) return "";
  const sums = new Map();
  for (const [name, waited] of step.lanes.flatMap((lane) => waitedFor(lane.waits))) {
    sums.set(name, (sums.get(name) ?? 0) + waited);
  }
  const longest = [...sums].sort(([, a], [, b]) => b - a);
  const said = longest.map(([name, waited]) => `${time(waited, step.unit, 3)} for ${name}`);
  return ` Compute waited ${said.length > 0 ? said.join(", ") : "for no transfer"}, ${word}.`;
}

/** What crossed each way of the devices' buses, and how fast. */
function fillHostLink(step) {
  byId("host-link").hidden = !step;
  if (!step) return;
  const rows = step.lanes.flatMap((lane, d) => [["in", lane.inward], ["out", lane.outward]]
    .filter(([, way]) => way).map(([word, way]) => busRow(step, `device ${d}, ${word}`, way)));
  const head = ["host link", "transfers", "bytes", "in use", "of the step", "rate"];
  byId("host-link-table").replaceChildren(
    element("thead", {}, element("tr", {}, ...head.map((word, column) =>
      element("th", { scope: "col", ...ofBusColumn(column) }, word)))),
    element("tbody", {}, ...rows));
}

/** What a narrow page leaves out. */
function ofBusColumn(column) {
  return column === 1 || column === 3 ? { class: "wide" } : {};
}

function busRow(step, name, way) {
  const used = way.starts.reduce((sum, start, i) => sum + way.ends[i] - start, 0);
  const crossed = way.crossed.reduce((sum, bytes) => sum + bytes, 0);
  const rate = step.unit === "seconds" && used > 0 ? `${bytes(crossed / used)}/s` : "–";
  const share = shareBar(step.makespan > 0 ? used / step.makespan : 0);
  const cells = [way.count.toLocaleString("en"), bytes(crossed), time(used, step.unit, 3), share, rate];
  return element("tr", {}, element("th", { scope: "row" }, name),
    ...cells.map((cell, column) => element("td", ofBusColumn(column + 1), cell)));
}

function idleCells(step, lane) {
  const share = step.makespan > 0 ? lane.idle / step.makespan : 0;
  return [time(lane.busy, step.unit, 3), shareBar(share)];
}

function shareBar(share) {
  return element("span", { class: "share", style: `--share: ${share.toFixed(4)}` },
    element("i"), element("span", {}, percent(share)));
}

/** Memory over the run, and within the chosen step where its bytes are counted: made when wanted. */
function memoryViews(run, compared) {
  const views = [];
  if (run.steps.peaks.some((column) => column.some((peak) => peak !== null))) {
    views.push({ title: "Over the run", make: () => memoryOverRun(run) });
  }
  const steps = [["In this step", compared?.measured], ["In this step, simulated", compared?.simulated]];
  for (const [title, step] of steps) {
    if (step?.lanes.some((lane) => lane.bytes.length > 0)) {
      views.push({ title, make: () => memoryInStep(step) });
    }
  }
  return views;
}

function memoryOverRun({ steps }) {
  const last = steps.number.at(-1);
  return {
    summary: "The most bytes in use during each step.",
    lanes: steps.peaks.map((column) => column.map((peak, i) => [steps.number[i], peak ?? 0])),
    // A single step is a line all the same.
    range: [steps.number[0], Math.max(last, steps.number[0] + 1)],
    x: (step) => `step ${Math.min(step, last).toLocaleString("en")}`,
  };
}

function memoryInStep(step) {
  return {
    summary: "Bytes in use while each action ran, at its beginning or end.",
    lanes: step.lanes.map((lane) => Array.from(lane.bytes, (value, i) => [lane.starts[i], value])),
    range: [0, step.makespan],
    x: (at) => time(at, step.unit, 3),
  };
}

function fillMemory(run, { summary, lanes, range, x }) {
  const peaks = lanes.map((points) => extent([0, ...points.map((point) => point[1])])[1]);
  const limits = lanes.map((_, d) => run.devices[d]?.limit ?? null);
  const most = Math.max(...peaks);
  // A limit that is far away would press what is to be seen against the ground.
  const near = limits.filter((limit) => limit !== null && limit <= 4 * most);
  const top = 1.06 * Math.max(most, ...near);
  byId("memory-summary").textContent = summary
    + (near.length > 0 ? " The dashed line is the device's limit." : "");
  const panels = lanes.map((points, d) => {
    const of = limits[d] === null ? "" : ` of ${bytes(limits[d])}`;
    const name = run.devices[d]?.name ?? `device ${d}`;
    const caption = element("figcaption", {}, element("b", {}, name),
      element("span", {}, `peak ${bytes(peaks[d])}${of}`));
    const chart = element("div", { class: "chart" });
    const label = `Memory of ${name}: peak ${bytes(peaks[d])}${of}`;
    memoryChart(chart, { label, points, range, limit: limits[d], top, x });
    return element("figure", {}, caption, chart);
  });
  byId("memory-panels").replaceChildren(...panels);
}

function fillSizes({ decisions, decisions_left_out: leftOut }) {
  if (decisions.length === 0) return;
  byId("sizes").hidden = false;
  const count = (outcome) => decisions.filter((decision) => decision.outcome === outcome).length;
  const chosen = decisions.findLast(({ outcome }) => outcome === "chosen") ?? decisions.at(-1);
  const counts = [["tried", "○"], ["failed", "×"], ["chosen", "●"]].filter(([word]) => count(word) > 0)
    .map(([word, sign]) => `${sign} ${word} ${plural(count(word), "time")}`);
  byId("sizes-summary").textContent =
    `${counts.join(", ")}; at last ${plural(chosen.size, "sample")}: ${chosen.why}.`;
  sizesChart(byId("sizes-chart"), decisions);
  const or = (value) => (value === null ? "–" : bytes(value));
  const rows = decisions.map((decision) => element("tr", {},
    element("th", { scope: "row" }, decision.step.toLocaleString("en")),
    element("td", {}, decision.size.toLocaleString("en")),
    element("td", { class: `outcome ${decision.outcome}` }, decision.outcome),
    element("td", {}, or(decision.predicted)),
    element("td", {}, or(decision.measured)),
    element("td", {}, bytes(decision.available)),
    element("td", { class: "words" }, decision.why)));
  const head = ["step", "size", "outcome", "predicted", "needed", "free", "why"];
  byId("sizes-table").replaceChildren(
    element("thead", {}, element("tr", {}, ...head.map((word) =>
      element("th", word === "why" ? { scope: "col", class: "words" } : { scope: "col" }, word)))),
    element("tbody", {}, ...rows));
  if (leftOut > 0) byId("sizes-summary").textContent += ` ${plural(leftOut, "later decision")} left out.`;
}

function fillProgress({ steps, tests }) {
  if (steps.number.length === 0) return;
  byId("progress").hidden = false;
  const over = (column) => steps.number.map((step, i) => [step, column[i]]).filter(([, y]) => y !== null);
  const loss = { name: "loss", color: "var(--forward)", points: over(steps.loss) };
  const tested = tests.filter((test) => test.loss !== null).map((test) => [test.step, test.loss]);
  const test = { name: "test loss", color: "var(--recompute)", points: tested, dots: tested.length < 60 };
  const series = [loss, test].filter((one) => one.points.length > 0);
  byId("loss-caption").replaceChildren(...series.map(({ name, color }) => element("span", { class: "share" },
    element("span", { class: "swatch", style: `min-width: 14px; background: ${color}` }), name)));
  byId("loss-caption").style.justifyContent = "flex-start";
  if (series.length > 0) {
    lineChart(byId("loss-chart"), { label: "Loss by step", series, y: (value) => number(value, 4) });
  }
  const rate = { name: "samples/s", color: "var(--backward)", points: over(steps.samples_per_s) };
  lineChart(byId("rate-chart"), {
    label: "Samples a second by step", series: [rate], y: (value) => number(value, 4), fromZero: true,
  });
}

function fillSettings({ settings }) {
  if (settings.length === 0) return;
  byId("settings").hidden = false;
  byId("settings-list").replaceChildren(
    ...settings.map((setting) => element("div", {}, ...described(setting))));
}
