// One picture of lines and points: uPlot draws it; this adds marks, read-out, zoom and keys.
import { clock, compact, entry, figure, word, whole } from "./words.js";

const LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 24;
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, ...[1, 2, 5, 10, 20, 50].map((n) => n * 86400)];

const MARK_DASH = [5, 3];
const FORMS = ["circle", "square", "diamond", "triangle"]; // of the points of validation sets
const CORNERS = { square: [[-1, -1], [1, -1], [1, 1], [-1, 1]], diamond: [[0, -1.4], [1.4, 0], [0, 1.4], [-1.4, 0]], triangle: [[0, -1.3], [1.3, 1], [-1.3, 1]] };

function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// A piece of a line as the pictures draw it: a run's, or with a form that of a validation set.
export function sign(colour, dash, form = null) {
  const line = svg("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: colour, "stroke-width": form ? 1.5 : 3, "stroke-dasharray": dash.join(" ") });
  const parts = [line];
  if (form === "circle") parts.push(svg("circle", { cx: 13, cy: 5, r: 3.5, fill: colour }));
  else if (form) parts.push(svg("polygon", { points: CORNERS[form].map(([x, y]) => `${13 + 3 * x},${5 + 3 * y}`).join(" "), fill: colour }));
  return svg("svg", { width: 26, height: 10, "aria-hidden": "true" }, ...parts);
}

export class Chart {
  // `key` names the quantity; `hooks` has zoom(begin, end) and cursor(x, chart).
  constructor(key, hooks, wide = false) {
    Object.assign(this, { key, hooks, lines: [], drawn: [], axis: "step", range: null, at: null, isHere: false, drag: null });
    Object.assign(this, { log: false, logX: false, uplot: null, form: "", unit: "" });
    this.choseLog = false;
    this.element = document.createElement("figure");
    this.element.className = wide ? "wide" : "";
    this.element.dataset.key = key;
    this.caption = document.createElement("figcaption");
    this.title = document.createElement("span");
    this.note = document.createElement("span");
    this.note.className = "quiet";
    this.button = document.createElement("button");
    this.button.addEventListener("click", () => this.setLog(!this.log));
    this.caption.append(this.title, this.note, this.button);
    this.plot = document.createElement("div");
    this.plot.className = "plot";
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "img");
    this.nothing = document.createElement("p");
    this.nothing.className = "quiet";
    this.plot.append(this.nothing);
    this.readout = document.createElement("div");
    this.readout.className = "readout";
    this.readout.setAttribute("role", "status");
    this.readout.hidden = true;
    this.legend = document.createElement("div");
    this.legend.className = "legend quiet";
    this.element.append(this.caption, this.legend, this.plot, this.readout);
    this.listen();
  }

  setLog(value, chosen = true) {
    this.log = value;
    this.choseLog ||= chosen;
    this.draw();
  }

  // `lines`: {name, colour, dash, x, y, mx, my, bad, marks: [{name, x, y, step}]}; marks are joined points.
  show(lines, { axis, range, logX, resumed, unit = "" }) {
    Object.assign(this, { lines, axis, range, logX, resumed, unit });
    if (this.key === "grad_norm" && !this.choseLog) this.log = isSpiky(lines);
    this.draw();
    this.point(this.at, this.isHere);
  }

  listen() {
    const c = this.plot, pixel = (e) => e.clientX - c.getBoundingClientRect().left;
    c.addEventListener("pointerdown", (e) => {
      if (e.button) return;
      c.setPointerCapture(e.pointerId);
      this.drag = [pixel(e), pixel(e)];
    });
    c.addEventListener("pointermove", (e) => {
      if (this.drag) this.select(this.drag = [this.drag[0], pixel(e)]);
      this.hooks.cursor(this.toX(pixel(e)), this);
    });
    c.addEventListener("pointerup", () => {
      const drag = this.drag;
      this.select(this.drag = null);
      if (drag && Math.abs(drag[1] - drag[0]) > 6) this.hooks.zoom(...drag.map((p) => this.toX(p)).sort((a, b) => a - b));
    });
    c.addEventListener("pointercancel", () => this.select(this.drag = null));
    c.addEventListener("pointerleave", () => { if (!this.drag) this.hooks.cursor(null, this); });
    c.addEventListener("blur", () => this.hooks.cursor(null, this));
    c.addEventListener("dblclick", () => this.hooks.zoom(null, null));
    c.addEventListener("keydown", (e) => this.press(e));
  }

  select(drag) {
    const [begin, end] = (drag ?? [LEFT, LEFT]).map((p) => p - LEFT).sort((a, b) => a - b);
    this.uplot?.setSelect({ left: begin, top: 0, width: end - begin, height: drag ? this.uplot.over.clientHeight : 0 }, false);
  }

  press(e) {
    if (!this.uplot || e.ctrlKey || e.metaKey || e.altKey) return;
    const width = this.uplot.over.clientWidth, step = (e.shiftKey ? 20 : 4) * Math.max(1, width / 500);
    const now = this.at === null ? LEFT + width / 2 : this.toPixel(this.at);
    const move = (p) => this.hooks.cursor(this.toX(Math.min(LEFT + width, Math.max(LEFT, p))), this);
    const scale = (by) => this.hooks.zoom(...[LEFT, LEFT + width].map((p) => this.toX(now + (p - now) * by)));
    const actions = {
      ArrowLeft: () => move(now - step), ArrowRight: () => move(now + step), Home: () => move(LEFT),
      End: () => move(LEFT + width), "+": () => scale(0.5), "=": () => scale(0.5), "-": () => scale(2),
      0: () => this.hooks.zoom(null, null), Escape: () => this.hooks.zoom(null, null),
      l: () => this.setLog(!this.log), L: () => this.setLog(!this.log),
    };
    if (!(e.key in actions)) return;
    e.preventDefault();
    actions[e.key]();
  }

  toPixel(x) { return LEFT + this.uplot.valToPos(x, "x"); }
  toX(pixel) { return this.uplot ? this.uplot.posToVal(pixel - LEFT, "x") : null; }

  // The part of the x-axis that is shown; a logarithmic one begins above 0.
  rangeX() {
    const least = Math.max(this.range[0], this.axis === "step" ? 1 : this.range[1] * 1e-4);
    return this.isLogX() ? [least, this.range[1]] : this.range;
  }
  isLogX() { return this.logX && this.range[1] > Math.max(this.range[0], this.axis === "step" ? 1 : this.range[1] * 1e-4); }

  // The lowest and highest values within the range, with a margin.
  rangeY() {
    let [low, high] = [Infinity, -Infinity];
    for (const { x, y } of this.drawn)
      for (let i = 0; i < x.length; i++) {
        if (x[i] < this.range[0] || x[i] > this.range[1] || y[i] === null) continue;
        if (y[i] < low) low = y[i];
        if (y[i] > high) high = y[i];
      }
    if (low > high) return null;
    if (this.log) return [low / 1.05, high * 1.05];
    const margin = (high - low || Math.abs(high) || 1) * 0.04;
    return [low >= 0 ? Math.max(low - margin, 0) : low - margin, high + margin]; // no room below 0 for what is never negative
  }

  // What uPlot draws: of each line its points, their median, and marks; a logarithmic scale leaves gaps.
  parts() {
    const shown = (y) => (this.log ? y.map((v) => (v > 0 ? v : null)) : y);
    return this.lines.flatMap((line) => {
      const dash = line.dash.map((n) => 2 * n), out = [], { colour, name } = line;
      const isFaint = Boolean(line.mx), alpha = isFaint ? 0.45 / Math.sqrt(this.lines.length) : 1;
      if (line.x?.length) out.push({ line, colour, name, x: line.x, y: shown(line.y), width: isFaint ? 0.8 : 1.4, alpha, dash: isFaint ? [] : dash });
      if (line.mx) out.push({ colour, x: line.mx, y: shown(line.my), width: 1.9, alpha: 1, dash });
      for (const [n, marks] of (line.marks ?? []).entries())
        if (marks.x.length) out.push({ marks, line, colour, name: `${name}, ${marks.name}`, x: marks.x, y: shown(marks.y), width: 1.2, alpha: 1, dash: MARK_DASH, form: FORMS[n % FORMS.length] });
      return out;
    });
  }

  draw() {
    this.label();
    this.drawn = this.range ? this.parts() : [];
    this.y = this.drawn.length ? this.rangeY() : null;
    this.nothing.hidden = Boolean(this.y);
    if (!this.y) {
      this.uplot?.destroy();
      this.uplot = null;
      return;
    }
    const data = [null, ...this.drawn.map((part) => [part.x, part.y])], size = { width: this.plot.clientWidth, height: this.plot.clientHeight };
    const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
    this.colours = { quiet: colour("--quiet"), faint: colour("--faint"), bad: colour("--bad") };
    const lines = this.drawn.map(({ colour: stroke, width, alpha, dash }) => ({ stroke, width, alpha, dash }));
    const form = JSON.stringify([lines, this.colours, this.axis, this.log, this.isLogX()]);
    if (this.uplot && form === this.form) {
      this.uplot.batch(() => {
        this.uplot.setSize(size);
        this.uplot.setData(data);
      });
      return;
    }
    this.form = form;
    this.uplot?.destroy();
    this.uplot = new uPlot({ ...size, ...this.options(lines) }, data, this.plot);
  }

  options(lines) {
    const { quiet, faint } = this.colours, base = { stroke: quiet, font: "11px system-ui, sans-serif", ticks: { show: false } };
    const clamp = (u, value, low) => low, scale = (isLog, range) => ({ time: false, distr: isLog ? 3 : 1, clamp, range });
    const splits = (isLog, space) => isLog && { filter: (u, v) => v, splits: (u, i, low, high) => logTicks(low, high, u.axes[i].side % 2 ? u.over.clientHeight / space : u.over.clientWidth / space) };
    return {
      mode: 2, padding: [TOP, RIGHT, 0, 0], legend: { show: false },
      scales: { x: scale(this.isLogX(), () => this.rangeX()), y: scale(this.log, () => this.y) },
      axes: [
        { ...base, scale: "x", size: BOTTOM, space: 75, grid: { show: false }, incrs: this.axis === "time" ? TIMES : undefined,
          ...splits(this.isLogX(), 75), values: (u, ticks) => ticks.map((v) => this.formX(v)) },
        { ...base, scale: "y", side: 3, size: LEFT, space: 36, grid: { stroke: faint, width: 1 },
          ...splits(this.log, 28), values: (u, ticks) => ticks.map((v) => this.formY(v)) },
      ],
      // Pointers and keys are handled here, by touch too; uPlot moves the cursor as it is told.
      cursor: {
        y: false, drag: { x: false, y: false }, dataIdx: (u, i) => this.indexAt(this.drawn[i - 1]),
        points: { size: 7, width: 0, fill: (u, i) => this.drawn[i - 1].colour },
        bind: Object.fromEntries(["mousedown", "mouseup", "mousemove", "mouseenter", "mouseleave", "dblclick", "click"].map((name) => [name, () => null])),
      },
      series: [{}, ...lines.map((line) => ({
        ...line, paths: uPlot.paths.linear(), pxAlign: 0, points: { show: false }, facets: [{ scale: "x", auto: true }, { scale: "y", auto: true }],
      }))],
      hooks: { draw: [(u) => this.paint(u)] },
    };
  }

  label() {
    const text = entry("titles", this.key) || this.key;
    this.title.textContent = text;
    const width = this.lines.find((line) => line.width > 1)?.width;
    const unit = entry("units", this.unit || this.key) || this.unit, median = width ? word("medianOf").replace("{n}", whole(width)) : "";
    this.note.textContent = [unit, median].filter(Boolean).join("; ");
    this.button.textContent = word("log");
    this.button.setAttribute("aria-pressed", String(this.log));
    this.nothing.textContent = word("nothing");
    this.labelSigns();
    this.plot.setAttribute("aria-label", `${text}: ${this.lines.map((l) => l.name).join(", ")}`);
  }

  // The legend: the colour of each run if there are several, and the form of each kind of line if there are two.
  labelSigns() {
    const lines = this.lines.filter((line) => line.x?.length || line.marks?.some((m) => m.x.length)), entries = [];
    const add = (picture, text) => {
      const item = document.createElement("span");
      item.append(picture, text);
      entries.push(item);
    };
    const runs = lines.length > 1 ? lines : [];
    for (const { colour, dash, name } of runs) add(sign(colour, dash.map((n) => 2 * n)), name);
    const colour = lines.length > 1 ? "currentColor" : lines[0]?.colour;
    const forms = new Map(lines.flatMap((line) => (line.marks ?? []).map((m, n) => [m.name, FORMS[n % FORMS.length]])));
    if (forms.size && lines.some((line) => line.x?.length)) add(sign(colour, []), word("training"));
    for (const [name, form] of forms) add(sign(colour, MARK_DASH, form), name);
    this.legend.replaceChildren(...entries);
  }

  // Adds to uPlot's lines: where the run was resumed, points of marks, and crosses for values that are not finite.
  paint(u) {
    const g = u.ctx, { left, top, width, height } = u.bbox, dpr = window.devicePixelRatio || 1;
    const toX = (x) => u.valToPos(x, "x", true), path = (...points) => points.forEach(([x, y], n) => (n % 2 ? g.lineTo(x, y) : g.moveTo(x, y)));
    g.save();
    g.beginPath();
    g.rect(left, 0, width, top + height);
    g.clip();
    g.lineWidth = dpr;
    g.strokeStyle = this.colours.quiet;
    g.setLineDash([4 * dpr, 3 * dpr]);
    g.beginPath();
    for (const x of this.resumed ?? []) path([toX(x), top], [toX(x), top + height]);
    g.stroke();
    g.setLineDash([]);
    for (const { marks, form, colour, x, y } of this.drawn) {
      g.fillStyle = colour;
      if (marks ? x.length < 200 : x.length === 1)
        for (const [i, value] of y.entries()) {
          if (value === null) continue;
          const at = [toX(x[i]), u.valToPos(value, "y", true)];
          g.beginPath();
          if (form in CORNERS) for (const corner of CORNERS[form]) g.lineTo(...corner.map((c, k) => at[k] + 3 * dpr * c));
          else g.arc(...at, 3 * dpr, 0, 7);
          g.fill();
        }
    }
    g.strokeStyle = this.colours.bad;
    g.lineWidth = 1.5 * dpr;
    g.beginPath();
    for (const x of this.lines.flatMap((line) => line.bad ?? [])) {
      const [a, b, size] = [toX(x), top + 6 * dpr, 3 * dpr];
      path([a - size, b - size], [a + size, b + size], [a - size, b + size], [a + size, b - size]);
    }
    g.stroke();
    g.restore();
  }

  // The point of a line that the cursor reads: the nearest one; of marks only if it is close.
  indexAt({ line, marks, x, y }) {
    if (!line || this.at === null) return null;
    const i = nearest(x, this.at), reach = this.toX(LEFT + 12) - this.toX(LEFT) || Infinity;
    const isFar = marks && line.x?.length && Math.abs(x[i] - this.at) >= reach;
    return isFar || y[i] === null || x[i] < this.range[0] || x[i] > this.range[1] ? null : i;
  }

  values() {
    return this.drawn.flatMap((part) => {
      const i = this.indexAt(part), { line, marks, name, colour } = part;
      const m = i !== null && !marks && line.mx ? nearest(line.mx, this.at) : -1;
      return i === null ? [] : [{ name, colour, x: part.x[i], y: part.y[i], median: m < 0 ? null : line.my[m] }];
    });
  }

  // Moves the cursor; the picture that the user looks at shows the numbers too.
  point(x, isHere) {
    this.isHere = isHere;
    this.at = x === null || !this.uplot || x < this.range[0] || x > this.range[1] ? null : x;
    this.uplot?.setCursor(this.at === null ? { left: -10, top: -10 } : { left: this.uplot.valToPos(this.at, "x"), top: 1 });
    const values = this.at === null || !isHere ? [] : this.values();
    this.readout.hidden = !values.length;
    if (!values.length) return;
    const head = document.createElement("b");
    head.textContent = `${word(this.axis)} ${this.formX(values[0].x, true)}`;
    this.readout.replaceChildren(head, ...values.map((v) => {
      const row = document.createElement("div"), mark = document.createElement("i");
      mark.style.background = v.colour;
      const median = v.median === null ? "" : ` (${word("median")} ${this.formY(v.median, true)})`;
      row.append(mark, `${v.name}: ${this.formY(v.y, true)}${median}`);
      return row;
    }));
    const isRight = this.toPixel(this.at) > this.plot.clientWidth / 2;
    this.readout.style.left = isRight ? `${LEFT}px` : "auto";
    this.readout.style.right = isRight ? "auto" : `${RIGHT}px`;
  }

  formX(x, exact = false) {
    if (this.axis === "time") return clock(x);
    return exact ? whole(x) : compact(x);
  }
  formY(y, exact = false) {
    if (this.key === "mfu") return `${figure(Number(y.toPrecision(4)))}%`;
    if (this.key === "tokens_per_second" && !exact) return compact(y);
    return exact ? figure(y) : figure(Number(y.toPrecision(6)));
  }
}

function isSpiky(lines) {
  const y = lines.flatMap((line) => line.y ?? []).sort((a, b) => a - b);
  return y.length > 20 && y[0] > 0 && y[y.length - 1] > 20 * y[y.length >> 1];
}

export function nearest(xs, x) {
  let [low, high] = [0, xs.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : xs.length ? low : -1;
}

// Ticks of a logarithmic axis: 1, 2 and 5 of each decade if there is room; few decades get plain ticks.
function logTicks(low, high, most) {
  const decades = Math.log10(high / low), out = [];
  if (decades < 0.7) {
    const power = 10 ** Math.floor(Math.log10((high - low) / most)), step = [1, 2, 5, 10].find((n) => n * power * most >= high - low) * power;
    for (let n = Math.ceil(low / step); n * step <= high; n++) out.push(n * step);
    return out;
  }
  const leaders = decades * 3 <= most ? [1, 2, 5] : [1], every = Math.max(1, Math.ceil(decades / most));
  for (let p = Math.floor(Math.log10(low)); 10 ** p <= high; p++)
    if (p % every === 0) out.push(...leaders.map((n) => n * 10 ** p).filter((v) => v >= low && v <= high));
  return out;
}
