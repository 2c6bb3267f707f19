// One picture of lines and points on a canvas: scales, drawing, read-out, zoom, keys.
import { clock, compact, entry, figure, word, whole } from "./words.js";

const LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 24;

export class Chart {
  // `key` names the quantity; `hooks` has zoom(begin, end), cursor(x, chart) and changed().
  constructor(key, hooks, wide = false) {
    Object.assign(this, { key, hooks, lines: [], axis: "step", range: null, at: null, isHere: false, drag: null, log: false, logX: false });
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
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.readout = document.createElement("div");
    this.readout.className = "readout";
    this.readout.setAttribute("role", "status");
    this.readout.hidden = true;
    this.element.append(this.caption, this.canvas, this.readout);
    this.listen();
  }

  setLog(value, chosen = true) {
    this.log = value;
    this.choseLog ||= chosen;
    this.draw();
  }

  // `lines`: {name, colour, dash, x, y, mx, my, bad, marks: [{name, x, y, step}]}; marks are joined points.
  show(lines, { axis, range, logX, resumed }) {
    Object.assign(this, { lines, axis, range, logX, resumed });
    if (this.key === "grad_norm" && !this.choseLog) this.log = isSpiky(lines);
    this.point(this.at, this.isHere);
  }

  listen() {
    const c = this.canvas, place = (e) => e.clientX - c.getBoundingClientRect().left;
    c.addEventListener("pointerdown", (e) => {
      if (e.button) return;
      c.setPointerCapture(e.pointerId);
      this.drag = [place(e), place(e)];
    });
    c.addEventListener("pointermove", (e) => {
      if (this.drag) this.drag[1] = place(e);
      this.hooks.cursor(this.toX(place(e)), this);
    });
    c.addEventListener("pointerup", () => {
      const drag = this.drag;
      this.drag = null;
      if (drag && Math.abs(drag[1] - drag[0]) > 6) this.hooks.zoom(...drag.map((p) => this.toX(p)).sort((a, b) => a - b));
      else this.draw();
    });
    c.addEventListener("pointercancel", () => { this.drag = null; this.draw(); });
    c.addEventListener("pointerleave", () => { if (!this.drag) this.hooks.cursor(null, this); });
    c.addEventListener("blur", () => this.hooks.cursor(null, this));
    c.addEventListener("dblclick", () => this.hooks.zoom(null, null));
    c.addEventListener("keydown", (e) => this.press(e));
  }

  press(e) {
    if (!this.range || e.ctrlKey || e.metaKey || e.altKey) return;
    const { width } = this.box(), step = (e.shiftKey ? 20 : 4) * Math.max(1, width / 500);
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

  box() {
    const r = this.canvas.getBoundingClientRect();
    return { width: Math.max(10, r.width - LEFT - RIGHT), height: Math.max(10, r.height - TOP - BOTTOM), all: r };
  }

  scaleX() {
    const least = Math.max(this.range[0], this.axis === "step" ? 1 : this.range[1] * 1e-4);
    return this.logX && this.range[1] > least
      ? { from: Math.log10(least), to: Math.log10(this.range[1]), of: (x) => Math.log10(Math.max(x, least)), back: (v) => 10 ** v }
      : { from: this.range[0], to: this.range[1], of: (x) => x, back: (v) => v };
  }
  toPixel(x) {
    const s = this.scaleX();
    return LEFT + ((s.of(x) - s.from) / (s.to - s.from || 1)) * this.box().width;
  }
  toX(pixel) {
    if (!this.range) return null;
    const s = this.scaleX();
    return s.back(s.from + ((pixel - LEFT) / this.box().width) * (s.to - s.from));
  }

  // The lowest and highest values within the range.
  extent() {
    let [low, high] = [Infinity, -Infinity];
    const see = (x, y) => {
      for (let i = 0; i < x.length; i++) {
        if (x[i] < this.range[0] || x[i] > this.range[1] || (this.log && !(y[i] > 0))) continue;
        if (y[i] < low) low = y[i];
        if (y[i] > high) high = y[i];
      }
    };
    for (const line of this.lines) for (const part of [line, ...(line.marks ?? [])]) see(part.x ?? [], part.y ?? []);
    if (low > high) return null;
    if (this.log) return [Math.log10(low) - 0.02, Math.log10(high) + 0.02];
    const margin = (high - low || Math.abs(high) || 1) * 0.04;
    return [low >= 0 ? Math.max(low - margin, 0) : low - margin, high + margin]; // no room below 0 for what is never negative
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.paint());
  }

  paint() {
    const { width, height, all } = this.box(), dpr = window.devicePixelRatio || 1, c = this.canvas;
    if (c.width !== Math.round(all.width * dpr) || c.height !== Math.round(all.height * dpr)) {
      c.width = Math.round(all.width * dpr);
      c.height = Math.round(all.height * dpr);
    }
    const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
    const g = c.getContext("2d");
    this.label();
    g.setTransform(dpr, 0, 0, dpr, 0, 0);
    g.clearRect(0, 0, all.width, all.height);
    g.font = "11px system-ui, sans-serif";
    const y = this.range && this.extent();
    if (!y) {
      g.fillStyle = colour("--quiet");
      g.fillText(word("nothing"), LEFT, TOP + height / 2);
      return;
    }
    const toY = (v) => TOP + height * (1 - ((this.log ? Math.log10(v) : v) - y[0]) / (y[1] - y[0]));
    const toX = (x) => this.toPixel(x);
    this.grid(g, y, toY, { width, height, ink: colour("--quiet"), faint: colour("--faint") });
    g.save();
    g.beginPath();
    g.rect(LEFT, 0, width, TOP + height);
    g.clip();
    for (const x of this.resumed ?? []) rule(g, toX(x), height, colour("--quiet"), [4, 3]);
    for (const line of this.lines) this.stroke(g, line, toX, toY, colour("--bad"));
    if (this.drag) {
      g.fillStyle = colour("--line") + "33";
      g.fillRect(Math.min(...this.drag), TOP, Math.abs(this.drag[1] - this.drag[0]), height);
    }
    if (this.at !== null) {
      rule(g, toX(this.at), height, colour("--quiet"), []);
      for (const value of this.values()) dot(g, toX(value.x), toY(value.y), 3.5, value.colour);
    }
    g.restore();
  }

  label() {
    const text = entry("titles", this.key) || this.key;
    this.title.textContent = text;
    const width = this.lines.find((line) => line.width > 1)?.width;
    const unit = entry("units", this.key), median = width ? word("medianOf").replace("{n}", whole(width)) : "";
    this.note.textContent = [unit, median].filter(Boolean).join("; ");
    this.button.textContent = word("log");
    this.button.setAttribute("aria-pressed", String(this.log));
    this.canvas.setAttribute("aria-label", `${text}: ${this.lines.map((l) => l.name).join(", ")}`);
  }

  grid(g, y, toY, { width, height, ink, faint }) {
    g.fillStyle = ink;
    g.strokeStyle = faint;
    g.lineWidth = 1;
    g.textAlign = "right";
    g.textBaseline = "middle";
    for (const v of this.log ? logTicks(...y, height / 28) : ticks(...y, height / 40)) {
      const at = Math.round(toY(v)) + 0.5;
      g.beginPath(); g.moveTo(LEFT, at); g.lineTo(LEFT + width, at); g.stroke();
      g.fillText(this.formY(v), LEFT - 6, at);
    }
    g.textAlign = "center";
    g.textBaseline = "top";
    const s = this.scaleX(), most = width / 75;
    for (const v of this.logX ? logTicks(s.from, s.to, most) : ticks(s.from, s.to, most, this.axis === "time")) {
      const at = this.toPixel(v);
      if (at < LEFT - 1 || at > LEFT + width + 1) continue;
      g.fillText(this.formX(v), Math.min(at, LEFT + width - 14), TOP + height + 8);
    }
  }

  stroke(g, line, toX, toY, bad) {
    const path = (x, y) => {
      g.beginPath();
      let open = false;
      for (let i = 0; i < x.length; i++) {
        if (this.log && !(y[i] > 0)) { open = false; continue; }
        if (open) g.lineTo(toX(x[i]), toY(y[i]));
        else g.moveTo(toX(x[i]), toY(y[i]));
        open = true;
      }
      g.stroke();
    };
    g.strokeStyle = line.colour;
    g.lineJoin = "round";
    if (line.x?.length) {
      g.globalAlpha = line.mx ? 0.45 / Math.sqrt(this.lines.length) : 1;
      g.lineWidth = line.mx ? 0.8 : 1.4;
      g.setLineDash(line.mx ? [] : line.dash.map((n) => 2 * n));
      path(line.x, line.y);
      g.globalAlpha = 1;
      if (line.x.length === 1) dot(g, toX(line.x[0]), toY(line.y[0]), 3, line.colour);
    }
    if (line.mx) {
      g.lineWidth = 1.9;
      g.setLineDash(line.dash.map((n) => 2 * n));
      path(line.mx, line.my);
    }
    for (const [n, marks] of (line.marks ?? []).entries()) {
      g.lineWidth = 1.2;
      g.setLineDash(n ? [2, 3 + n] : [5, 3]);
      path(marks.x, marks.y);
      g.setLineDash([]);
      if (marks.x.length < 200) for (let i = 0; i < marks.x.length; i++) dot(g, toX(marks.x[i]), toY(marks.y[i]), 3, line.colour);
    }
    g.setLineDash([]);
    g.strokeStyle = bad;
    g.lineWidth = 1.5;
    for (const x of line.bad ?? []) cross(g, toX(x), TOP + 6);
  }

  // The values at the cursor: of each line the nearest point, and of marks the nearest if it is close.
  values() {
    const out = [], reach = (this.toX(LEFT + 12) - this.toX(LEFT)) || Infinity;
    for (const line of this.lines) {
      const i = nearest(line.x ?? [], this.at);
      if (i >= 0) {
        const m = line.mx ? nearest(line.mx, this.at) : -1;
        out.push({ name: line.name, colour: line.colour, x: line.x[i], y: line.y[i], median: m < 0 ? null : line.my[m] });
      }
      for (const marks of line.marks ?? []) {
        const j = nearest(marks.x, this.at);
        if (j >= 0 && (i < 0 || Math.abs(marks.x[j] - this.at) < reach))
          out.push({ name: `${line.name}, ${marks.name}`, colour: line.colour, x: marks.x[j], y: marks.y[j], median: null });
      }
    }
    return out.filter((v) => v.x >= this.range[0] && v.x <= this.range[1] && !(this.log && !(v.y > 0)));
  }

  // Moves the cursor; the picture that the user looks at shows the numbers too.
  point(x, isHere) {
    this.isHere = isHere;
    this.at = x === null || !this.range || x < this.range[0] || x > this.range[1] ? null : x;
    const found = this.at === null || !isHere ? [] : this.values();
    this.readout.hidden = !found.length;
    if (found.length) {
      const head = document.createElement("b");
      head.textContent = `${word(this.axis)} ${this.formX(found[0].x, true)}`;
      this.readout.replaceChildren(head, ...found.map((v) => {
        const row = document.createElement("div"), mark = document.createElement("i");
        mark.style.background = v.colour;
        const median = v.median === null ? "" : ` (${word("median")} ${this.formY(v.median, true)})`;
        row.append(mark, `${v.name}: ${this.formY(v.y, true)}${median}`);
        return row;
      }));
      const isRight = this.toPixel(this.at) > this.box().all.width / 2;
      this.readout.style.left = isRight ? `${LEFT}px` : "auto";
      this.readout.style.right = isRight ? "auto" : `${RIGHT}px`;
    }
    this.draw();
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

export function ticks(low, high, most, isTime = false) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(rough));
  const times = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const step = (isTime && times.find((t) => t >= rough)) || [1, 2, 5, 10].map((n) => n * power).find((s) => s >= rough * 0.999);
  const out = [];
  for (let n = Math.ceil(low / step); n * step <= high && out.length < 100; n++) out.push(n * step);
  return out;
}

// Ticks between powers of ten: 1, 2 and 5 of each decade if there is room; few decades get plain ticks.
export function logTicks(low, high, most) {
  if (high - low < 0.7) return ticks(10 ** low, 10 ** high, most).filter((v) => v > 0);
  const leaders = (high - low) * 3 <= most ? [1, 2, 5] : [1], every = Math.max(1, Math.ceil((high - low) / most));
  const out = [];
  for (let p = Math.floor(low); p <= high; p++)
    for (const n of leaders) if (p % every === 0 && Math.log10(n) + p >= low && Math.log10(n) + p <= high) out.push(n * 10 ** p);
  return out;
}

function rule(g, x, height, colour, dash) {
  g.strokeStyle = colour;
  g.lineWidth = 1;
  g.setLineDash(dash);
  g.beginPath(); g.moveTo(x, TOP); g.lineTo(x, TOP + height); g.stroke();
  g.setLineDash([]);
}
function dot(g, x, y, r, colour) {
  g.fillStyle = colour;
  g.beginPath(); g.arc(x, y, r, 0, 7); g.fill();
}
function cross(g, x, y) {
  g.beginPath(); g.moveTo(x - 3, y - 3); g.lineTo(x + 3, y + 3); g.moveTo(x - 3, y + 3); g.lineTo(x + 3, y - 3); g.stroke();
}
