// Reads the run and shows it.

const run = JSON.parse(byId("run").textContent);
let timeline = null;

fillHead(run);
fillSizes(run);
fillProgress(run);
fillSettings(run);

/** Shows one of the steps: its timeline, its idle times, its memory. */
function showStep(index) {
  const { measured, simulated } = run.timelines[index];
  const compared = {
    measured: measured && decoded(measured),
    simulated: simulated && decoded(simulated),
  };
  timeline?.close();
  timeline = new Timeline(byId("panels"), compared);
  fillLegend(compared);
  fillIdle(compared, run.devices);
  showMemory(compared);
}

function showMemory(compared) {
  const views = memoryViews(run, compared);
  byId("memory").hidden = views.length === 0;
  if (views.length === 0) return;
  fillChoices(byId("memory-over"), views.map(({ title }) => title), (i) => fillMemory(run, views[i].make()))(0);
}

if (run.timelines.length > 0) {
  byId("timeline").hidden = false;
  byId("idle").hidden = false;
  const titles = run.timelines.map(({ title }) => title);
  // Of a run the last step, of a plan the best.
  const first = run.ended === "planned" ? 0 : titles.length - 1;
  fillChoices(byId("steps"), titles, showStep)(first);
} else {
  showMemory(null);
}

byId("zoom-in").addEventListener("click", () => timeline?.zoom(ZOOM));
byId("zoom-out").addEventListener("click", () => timeline?.zoom(1 / ZOOM));
byId("zoom-all").addEventListener("click", () => timeline?.all());
addEventListener("scroll", hideTooltip, { passive: true });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => timeline?.redraw());
