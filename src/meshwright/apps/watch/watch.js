// The live page: reads the state from a stream of events and the curves of what is shown.
import { Chart, sign } from "./chart.js";
import { clock, compact, currentLanguage, date, entry, figure, setLanguage, whole, word } from "./words.js";

const KEYS = ["loss", "lr", "grad_norm", "tokens_per_second", "ms", "mfu", "memory"];
const SMOOTH = [0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5]; // shares of the steps that are shown
const FIRST_SHOWN = 8; // runs that are shown before anything is chosen
const PAUSE = 1000, IDLE = 15000; // ms between requests of curves at least; and at most, while a run goes on
const $ = (id) => document.getElementById(id);

const kept = {
  get: (name, otherwise) => { try { return JSON.parse(localStorage.getItem(`watch-${name}`)) ?? otherwise; } catch { return otherwise; } },
  set: (name, value) => { try { localStorage.setItem(`watch-${name}`, JSON.stringify(value)); } catch { /* private window */ } },
};
let state = { runs: [], different: {} }, curves = {}, zoom = [null, null];
let axis = kept.get("axis", "step"), logX = kept.get("logX", false), smooth = kept.get("smooth", 4);
let shown = new Map(), isPaused = false, isLive = null, theme = kept.get("theme", "auto");
const charts = new Map(), scoreCharts = new Map();
const sample = { run: null, step: null, follows: true, key: "" };

// Elements, whose texts are always set as text.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
const visible = () => state.runs.filter((run) => shown.get(run.folder));

// The view

const hooks = {
  zoom(begin, end) {
    if (begin !== null) {
      const [from, to] = extent();
      [begin, end] = [Math.max(begin, from), Math.min(end, to)];
      if (!(end - begin > (to - from) * 1e-7)) return;
      if (begin <= from && end >= to) begin = end = null;
    }
    zoom = [begin, end];
    refresh(true);
  },
  cursor(x, chart) {
    for (const other of [...charts.values(), ...scoreCharts.values()]) other.point(x, other === chart);
  },
};

function extent() {
  const ranges = Object.values(curves).map((c) => c.range).filter(Boolean);
  return [axis === "step" ? Math.min(...ranges.map((r) => r[0])) : 0, Math.max(...ranges.map((r) => r[1]))];
}

function chart(map, key, parent) {
  if (!map.has(key)) {
    const made = new Chart(key, hooks, key === "loss");
    parent.append(made.element);
    map.set(key, made);
  }
  return map.get(key);
}

function drawCurves() {
  const runs = visible().filter((run) => curves[run.folder]), has = runs.some((run) => curves[run.folder].range);
  const whole = has ? extent() : null, range = whole && [zoom[0] ?? whole[0], zoom[1] ?? whole[1]];
  if (range && range[0] === range[1]) range[1] += 1;
  const view = { axis, logX, range, resumed: runs.length === 1 ? curves[runs[0].folder].resumed : [] };
  const lossUnit = runs.length ? curves[runs[0].folder].loss_unit : "";
  const base = (run) => ({ name: run.name, colour: run.colour, dash: run.dash });
  for (const key of KEYS) {
    const lines = runs.map((run) => {
      const marks = key === "loss" ? Object.entries(curves[run.folder].checks).map(([name, v]) => ({ name, ...v })) : [];
      return { ...base(run), ...(curves[run.folder].lines[key] ?? {}), marks };
    });
    const isEmpty = !lines.some((line) => line.x?.length || line.bad?.length || line.marks.some((m) => m.x.length));
    const one = chart(charts, key, $("charts"));
    one.element.hidden = isEmpty && key !== "loss";
    one.show(lines, { ...view, unit: key === "loss" ? lossUnit : "" });
  }
  const names = [...new Set(runs.flatMap((run) => Object.keys(curves[run.folder].scores)))].sort();
  $("scores-section").hidden = !names.length;
  for (const name of new Set([...names, ...scoreCharts.keys()])) {
    const lines = runs.map((run) => {
      const found = curves[run.folder].scores[name];
      return { ...base(run), marks: found ? [{ name, ...found }] : [] };
    });
    const one = chart(scoreCharts, name, $("scores"));
    one.element.hidden = !names.includes(name);
    const unit = lines.flatMap((line) => line.marks).find((mark) => mark.unit)?.unit ?? "";
    one.show(lines, { ...view, unit });
  }
}

// Requests: one at a time, rarely for long runs, whose picture a few steps do not change.

let asking = false, again = false, timer = 0, took = 0, askedAt = 0, drawnAt = new Map();

function refresh(atOnce = false) {
  clearTimeout(timer);
  if (asking) { again = true; return; }
  const since = performance.now() - askedAt, least = Math.max(PAUSE, 10 * took);
  if (document.hidden || (isPaused && !atOnce)) return;
  if (atOnce || since >= (hasGrown() ? least : IDLE)) ask();
  else if (visible().some((run) => run.steps !== drawnAt.get(run.folder))) timer = setTimeout(refresh, Math.max(least - since, 200));
}

function hasGrown() {
  const isOld = zoom[1] !== null && Object.values(curves).every((c) => !c.range || c.range[1] > zoom[1]);
  return !isOld && visible().some((run) => {
    const before = drawnAt.get(run.folder);
    return before === undefined || run.steps < before || run.steps - before > before / 2000;
  });
}

async function ask() {
  const runs = visible();
  asking = true;
  again = false;
  askedAt = performance.now();
  const pixels = Math.max(300, ...[...charts.values()].map((c) => c.plot.clientWidth));
  const query = new URLSearchParams({ axis, smooth: SMOOTH[smooth], points: Math.min(4000, 2 * Math.round(pixels)) });
  if (zoom[0] !== null) { query.set("begin", zoom[0]); query.set("end", zoom[1]); }
  for (const run of runs) query.append("run", run.folder);
  try {
    const answer = runs.length ? await (await fetch(`/api/curves?${query}`)).json() : {};
    curves = answer;
    for (const run of runs) drawnAt.set(run.folder, run.steps);
    drawCurves();
  } catch { /* the stream of events says that the connection is lost, and asks again after it */ }
  took = performance.now() - askedAt;
  asking = false;
  if (again) refresh(true);
}

// The table of runs

function stateText(run) {
  if (run.problem) return `${word("problem")}: ${run.problem}`;
  if (run.read < 0.999) return `${word("reading")} ${Math.floor(100 * run.read)} %`;
  const end = run.attempts.at(-1)?.end;
  return word(run.state) + (end && ["ended", "failed"].includes(run.state) ? `: ${end}` : "");
}

// The table's columns before and after the state: word, text of a run, whether a narrow screen goes without it.
const FIGURES = [
  ["loss", (run) => figure(run.loss)],
  ["validation", (run) => figure(run.validation)],
];
const COLUMNS = [
  ["step", (run) => (run.train_iters ? `${whole(run.step ?? 0)} ${word("of")} ${whole(run.train_iters)}` : whole(run.step))],
  ["left", (run) => (run.state === "running" ? clock(run.left) : "")],
  ["best", (run) => (run.best ? `${figure(run.best[0])} (${whole(run.best[1])})` : ""), true],
  ["speed", (run) => compact(run.tokens_per_second)],
  ["mfu", (run) => (run.mfu ? `${(100 * run.mfu).toFixed(1)}%` : ""), true],
  ["memory", (run) => (run.memory ? `${(run.memory / 2 ** 30).toFixed(2)} GiB` : ""), true],
  ["elapsed", (run) => (run.step ? clock(run.seconds) : ""), true],
  ["goodput", (run) => (run.goodput == null ? "" : `${(100 * run.goodput).toFixed(1)}%`), true],
  ["recovery", (run) => (run.recovery == null ? "" : clock(run.recovery)), true],
  ["amount", (run) => (run.amount ? `${compact(run.amount)} ${word(run.unit === "tokens" ? "tokens" : "samplesUnit")}` : ""), true],
];

function rowOf(run, figures, columns) {
  const box = make("input", { type: "checkbox", "data-run": run.folder });
  box.checked = shown.get(run.folder);
  box.addEventListener("change", () => { shown.set(run.folder, box.checked); refresh(true); });
  const status = make("td", { class: run.problem ? "failed" : run.state }, stateText(run));
  if (run.step && run.train_iters) status.append(make("progress", { max: run.train_iters, value: run.step, "aria-label": word("step") }));
  const cells = (of) => of.map(([key, text, isLess]) => make("td", { class: `number ${isLess ? "less" : ""}`, "data-key": key }, text(run)));
  const name = make("td", { title: run.folder }, make("label", {}, box, sign(run.colour, run.dash.map((n) => 2 * n)), run.name));
  return make("tr", {}, name, ...cells(figures), status, ...cells(columns));
}

function drawRuns() {
  const focused = document.activeElement?.dataset?.run;
  const filled = (all) => all.filter(([key, text]) => key === "step" || state.runs.some(text));
  const figures = filled(FIGURES), columns = filled(COLUMNS);
  const headsOf = (of) => of.map(([key, , isLess]) => [key, `number ${isLess ? "less" : ""}`]);
  const heads = [["name"], ...headsOf(figures), ["state"], ...headsOf(columns)];
  const head = make("tr", {}, ...heads.map(([key, kind = ""]) => make("th", { class: kind, scope: "col" }, word(key))));
  const rows = state.runs.map((run) => rowOf(run, figures, columns));
  $("runs").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
  if (focused) [...$("runs").querySelectorAll("input")].find((box) => box.dataset.run === focused)?.focus();
  const problems = state.runs.flatMap((run) => run.damage.map((text) => `${run.name}: ${word("damaged")}: ${text}`));
  problems.push(...state.runs.flatMap((run) => run.slow.map((text) => `${run.name}: ${text}`)));
  $("problems").replaceChildren(...[...new Set(problems)].map((text) => make("li", {}, text)));
  const running = state.runs.filter((run) => run.state === "running");
  const lead = running.length === 1 && running[0].step ? `${whole(running[0].step)} · ${figure(running[0].loss)} · ` : "";
  document.title = `${lead}${state.runs.map((run) => run.name).slice(0, 3).join(", ")} · Meshwright`;
  $("title").textContent = state.runs.length === 1 ? state.runs[0].name : "Meshwright";
}

function drawDetails() {
  const names = state.runs.map((run) => run.name), show = (v) => (v === null || v === undefined ? word("none") : JSON.stringify(v));
  const cells = (tag, texts) => make("tr", {}, ...texts.map((text) => make(tag, {}, text)));
  const rows = Object.entries(state.different).map(([name, values]) => cells("td", [name, ...values.map(show)]));
  $("different").replaceChildren(...(rows.length ? [cells("th", ["", ...names]), ...rows] : [cells("td", [word("equal")])]));
  const attempts = visible().flatMap((run) => run.attempts.map((a) => cells("td", [
    `${run.name} ${a.number}`, date(a.time), `${whole(a.began)}–${whole(a.last)}`, a.command, a.end ?? ""])));
  $("attempts").replaceChildren(cells("th", [word("run"), word("started"), word("iterations"), word("command"), word("end")]), ...attempts);
}

// Samples

function samplesOf(folder) {
  return state.runs.find((run) => run.folder === folder)?.samples ?? [];
}

function drawSampleTools() {
  const having = state.runs.filter((run) => run.samples.length);
  $("samples-section").hidden = !having.length;
  if (!having.length) return;
  if (!having.some((run) => run.folder === sample.run)) Object.assign(sample, { run: having[0].folder, follows: true });
  const options = having.map((run) => make("option", { value: run.folder }, run.name));
  $("samples-run").replaceChildren(...options);
  $("samples-run").value = sample.run;
  const steps = samplesOf(sample.run);
  if (sample.follows || !steps.includes(sample.step)) sample.step = steps.at(-1);
  $("samples-step").max = steps.length - 1;
  $("samples-step").value = steps.indexOf(sample.step);
  $("samples-value").textContent = whole(sample.step);
  loadSamples();
}

async function loadSamples() {
  const key = `${sample.run} ${sample.step} ${currentLanguage()}`;
  if (key === sample.key) return;
  sample.key = key;
  try {
    const texts = await (await fetch(`/api/samples?${new URLSearchParams({ run: sample.run, step: sample.step })}`)).json();
    if (key !== sample.key) return;
    $("samples").replaceChildren(...texts.map((s) => make("div", { class: "sample" }, make("b", {}, s.prompt || word("noPrompt")), s.text)));
  } catch { sample.key = ""; }
}

// Words, colours and controls

function say() {
  for (const element of document.querySelectorAll("[data-word]")) element.textContent = word(element.dataset.word);
  $("language").textContent = word("other");
  $("language").lang = currentLanguage() === "zh" ? "en" : "zh";
  $("theme").textContent = `${word("theme")}: ${word(theme)}`;
  $("connection").textContent = isLive === null ? "" : isLive ? (isPaused ? word("paused") : word("connected")) : word("lost");
  $("smooth-value").textContent = SMOOTH[smooth] ? `${figure(100 * SMOOTH[smooth])} %` : word("none");
}

function drawAll() {
  say();
  drawRuns();
  drawDetails();
  drawSampleTools();
  drawCurves();
}

function take(next) {
  state = next;
  for (const run of state.runs) if (!shown.has(run.folder)) shown.set(run.folder, shown.size < FIRST_SHOWN);
  say();
  drawRuns();
  drawDetails();
  drawSampleTools();
  refresh();
}

function setTheme(name) {
  theme = name;
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  kept.set("theme", name);
}

function listen() {
  $("language").addEventListener("click", () => {
    setLanguage(currentLanguage() === "zh" ? "en" : "zh");
    kept.set("language", currentLanguage());
    drawAll();
  });
  $("theme").addEventListener("click", () => {
    setTheme({ auto: "light", light: "dark", dark: "auto" }[theme]);
    drawAll();
  });
  $("axis").addEventListener("change", (e) => { axis = e.target.value; zoom = [null, null]; kept.set("axis", axis); refresh(true); });
  $("log-x").addEventListener("change", (e) => { logX = e.target.checked; kept.set("logX", logX); drawCurves(); });
  $("smooth").addEventListener("input", (e) => { smooth = Number(e.target.value); kept.set("smooth", smooth); say(); refresh(true); });
  $("reset").addEventListener("click", () => hooks.zoom(null, null));
  $("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    $("pause").setAttribute("aria-pressed", String(isPaused));
    say();
    refresh(!isPaused);
  });
  $("samples-run").addEventListener("change", (e) => { Object.assign(sample, { run: e.target.value, follows: true }); drawSampleTools(); });
  $("samples-step").addEventListener("input", (e) => {
    const steps = samplesOf(sample.run), at = Number(e.target.value);
    Object.assign(sample, { step: steps[at], follows: at === steps.length - 1 });
    drawSampleTools();
  });
  document.addEventListener("visibilitychange", () => refresh(!document.hidden));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCurves);
  new ResizeObserver(() => drawCurves()).observe($("charts"));
}

function connect() {
  const events = new EventSource("/api/events");
  events.onmessage = (e) => { isLive = true; if (!isPaused || !state.runs.length) take(JSON.parse(e.data)); };
  events.onerror = () => { isLive = false; say(); };
  events.onopen = () => { isLive = true; say(); };
  addEventListener("pagehide", () => events.close());
}

setLanguage(kept.get("language", navigator.language.startsWith("zh") ? "zh" : "en"));
setTheme(theme);
$("axis").value = axis;
$("log-x").checked = logX;
$("smooth").value = smooth;
listen();
say();
drawCurves();
connect();
