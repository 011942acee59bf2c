// Points on a canvas: up to some 10^5, drawn in one go, with zoom by dragging and the nearest point named.
const PAD = { left: 60, right: 12, top: 10, bottom: 34 };
export const COLOURS = ["#3b82d0", "#d9822b", "#2f9e6e", "#c0448f", "#8a6fd1", "#a8a11e", "#1fa5b5", "#c94f4f"];

export class Scatter {
  constructor(canvas, { x, y, low, high, xLabel, yLabel, onPoint, onZoom }) {
    Object.assign(this, { canvas, x, y, low, high, xLabel, yLabel, onPoint, onZoom, zoom: null, drag: null, marked: -1 });
    this.barred = [];
    this.kept = document.createElement("canvas");
    this.kept.width = 0;
    this.colour = new Uint8Array(x.length);
    this.isIn = new Uint8Array(x.length);
    canvas.addEventListener("pointerdown", (event) => { this.drag = { from: this.at(event), to: null }; });
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", () => this.drop());
    canvas.addEventListener("dblclick", () => this.reset());
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  reset() { this.setZoom(null); }

  setZoom(zoom) {
    this.zoom = zoom;
    // Whoever listens draws it with what else changes.
    if (this.onZoom) this.onZoom(zoom);
    else this.draw();
  }

  // Plus and minus zoom, arrows move what is zoomed, Escape shows all.
  key(event) {
    const [x0, x1, y0, y1] = this.bounds();
    const [w, h] = [x1 - x0, y1 - y0];
    const grown = { "+": -0.2, "=": -0.2, "-": 0.25 }[event.key];
    const moved = { ArrowLeft: [-0.2, 0], ArrowRight: [0.2, 0], ArrowUp: [0, 0.2], ArrowDown: [0, -0.2] }[event.key];
    if (event.key === "Escape") this.reset();
    else if (grown) this.setZoom([x0 - grown * w, x1 + grown * w, y0 - grown * h, y1 + grown * h]);
    else if (moved && this.zoom) this.setZoom([x0 + moved[0] * w, x1 + moved[0] * w, y0 + moved[1] * h, y1 + moved[1] * h]);
    else return;
    event.preventDefault();
  }

  // Whether a point lies in what is shown.
  shows(i) {
    if (!this.zoom) return true;
    const [x0, x1, y0, y1] = this.zoom;
    return this.x[i] >= x0 && this.x[i] <= x1 && this.y[i] >= y0 && this.y[i] <= y1;
  }

  mark(i) {
    if (i === this.marked) return;
    this.marked = i;
    this.overlay();
  }

  move(event) {
    if (this.drag) { this.drag.to = this.at(event); this.overlay(); return; }
    const found = this.nearest(...this.at(event));
    if (found !== this.pointed) { this.pointed = found; this.onPoint?.(found); }
  }

  drop() {
    const drag = this.drag;
    this.drag = null;
    if (drag?.to && Math.abs(drag.to[0] - drag.from[0]) > 6 && Math.abs(drag.to[1] - drag.from[1]) > 6) {
      const [a, b] = [this.invert(...drag.from), this.invert(...drag.to)];
      this.setZoom([Math.min(a[0], b[0]), Math.max(a[0], b[0]), Math.min(a[1], b[1]), Math.max(a[1], b[1])]);
      return;
    }
    this.draw();
  }

  bounds() {
    if (this.zoom) return this.zoom;
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (let i = 0; i < this.x.length; i++) {
      const [x, y] = [this.x[i], this.y[i]];
      if (!Number.isFinite(x) || !Number.isFinite(y)) continue;
      if (x < x0) x0 = x;
      if (x > x1) x1 = x;
      if (y < y0) y0 = y;
      if (y > y1) y1 = y;
    }
    if (x0 > x1) return [0, 1, 0, 1];
    return [0, x1 * 1.05 || 1, 0, y1 * 1.05 || 1];
  }

  scale() {
    const [x0, x1, y0, y1] = this.bounds();
    const [w, h] = [this.canvas.clientWidth - PAD.left - PAD.right, this.canvas.clientHeight - PAD.top - PAD.bottom];
    return { x0, y0, kx: w / (x1 - x0 || 1), ky: h / (y1 - y0 || 1), h };
  }

  invert(px, py) {
    const s = this.scale();
    return [s.x0 + (px - PAD.left) / s.kx, s.y0 + (PAD.top + s.h - py) / s.ky];
  }

  nearest(px, py) {
    const s = this.scale();
    let [best, least] = [-1, 144];
    for (let i = 0; i < this.x.length; i++) {
      const dx = PAD.left + (this.x[i] - s.x0) * s.kx - px;
      const dy = PAD.top + s.h - (this.y[i] - s.y0) * s.ky - py;
      const d = dx * dx + dy * dy - (this.isIn[i] ? 20 : 0);
      if (d < least) { least = d; best = i; }
    }
    return best;
  }

  draw() {
    const ratio = devicePixelRatio || 1;
    const [w, h] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (!w) return;
    this.canvas.width = w * ratio;
    this.canvas.height = h * ratio;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(document.body);
    const [text, line] = [style.color, style.getPropertyValue("--line")];
    const s = this.scale();
    this.axes(pen, s, w, h, text, line);
    pen.save();
    pen.beginPath();
    pen.rect(PAD.left, PAD.top, w - PAD.left - PAD.right, h - PAD.top - PAD.bottom);
    pen.clip();
    // What is out first and faint, so that what is in stays seen; of points on one pixel one is drawn.
    const groups = Array.from({ length: 2 * COLOURS.length }, () => []);
    const seen = new Uint8Array(Math.ceil(w) * Math.ceil(h));
    for (let i = 0; i < this.x.length; i++) {
      const px = PAD.left + (this.x[i] - s.x0) * s.kx;
      const py = PAD.top + s.h - (this.y[i] - s.y0) * s.ky;
      if (!(px >= 0 && px < w && py >= 0 && py < h)) continue;
      const group = this.isIn[i] * COLOURS.length + this.colour[i];
      const pixel = (py | 0) * Math.ceil(w) + (px | 0);
      if (seen[pixel] === group + 1) continue;
      seen[pixel] = group + 1;
      groups[group].push(px, py);
    }
    groups.forEach((points, group) => {
      const size = group >= COLOURS.length ? 4 : 2.5;
      pen.globalAlpha = group >= COLOURS.length ? 0.85 : 0.25;
      pen.fillStyle = COLOURS[group % COLOURS.length];
      for (let at = 0; at < points.length; at += 2) pen.fillRect(points[at] - size / 2, points[at + 1] - size / 2, size, size);
    });
    pen.restore();
    // What moves with the pointer is drawn over a copy: the points are many.
    this.kept.width = this.canvas.width;
    this.kept.height = this.canvas.height;
    this.kept.getContext("2d").drawImage(this.canvas, 0, 0);
    this.overlay();
  }

  overlay() {
    if (!this.kept.width) return;
    const pen = this.canvas.getContext("2d");
    pen.save();
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.drawImage(this.kept, 0, 0);
    pen.restore();
    const text = getComputedStyle(document.body).color;
    const [w, h] = [this.canvas.clientWidth, this.canvas.clientHeight];
    pen.save();
    pen.beginPath();
    pen.rect(PAD.left, PAD.top, w - PAD.left - PAD.right, h - PAD.top - PAD.bottom);
    pen.clip();
    this.details(pen, this.scale(), text);
    pen.restore();
    if (this.drag?.to) {
      const [[ax, ay], [bx, by]] = [this.drag.from, this.drag.to];
      pen.strokeStyle = text;
      pen.strokeRect(Math.min(ax, bx), Math.min(ay, by), Math.abs(ax - bx), Math.abs(ay - by));
    }
  }

  // The intervals that were asked for, and a ring around the point of the row that is pointed at.
  details(pen, s, text) {
    const place = (i, y) => [PAD.left + (this.x[i] - s.x0) * s.kx, PAD.top + s.h - (y - s.y0) * s.ky];
    pen.strokeStyle = text;
    pen.globalAlpha = 0.35;
    pen.beginPath();
    for (const i of this.barred) {
      pen.moveTo(...place(i, this.low[i]));
      pen.lineTo(...place(i, this.high[i]));
    }
    pen.stroke();
    pen.globalAlpha = 1;
    if (this.marked < 0) return;
    pen.lineWidth = 2;
    pen.beginPath();
    pen.arc(...place(this.marked, this.y[this.marked]), 7, 0, 2 * Math.PI);
    pen.stroke();
    pen.lineWidth = 1;
  }

  axes(pen, s, w, h, text, line) {
    pen.font = "12px system-ui, sans-serif";
    pen.fillStyle = text;
    pen.strokeStyle = line;
    const [, x1, , y1] = this.bounds();
    pen.textAlign = "center";
    for (const tick of ticks(s.x0, x1)) {
      const px = PAD.left + (tick - s.x0) * s.kx;
      pen.beginPath(); pen.moveTo(px, PAD.top); pen.lineTo(px, h - PAD.bottom); pen.stroke();
      pen.fillText(short(tick), px, h - PAD.bottom + 14);
    }
    pen.fillText(this.xLabel, (w + PAD.left) / 2, h - 4);
    pen.textAlign = "right";
    for (const tick of ticks(s.y0, y1)) {
      const py = PAD.top + s.h - (tick - s.y0) * s.ky;
      pen.beginPath(); pen.moveTo(PAD.left, py); pen.lineTo(w - PAD.right, py); pen.stroke();
      pen.fillText(short(tick), PAD.left - 6, py + 4);
    }
    pen.save();
    pen.translate(12, (h - PAD.bottom) / 2);
    pen.rotate(-Math.PI / 2);
    pen.textAlign = "center";
    pen.fillText(this.yLabel, 0, 0);
    pen.restore();
  }
}

function ticks(low, high) {
  const step = 10 ** Math.floor(Math.log10((high - low) / 4 || 1));
  const wide = [1, 2, 5, 10].map((k) => k * step).find((k) => (high - low) / k <= 6);
  const found = [];
  for (let at = Math.ceil(low / wide) * wide; at <= high; at += wide) found.push(at);
  return found;
}

// Four digits, and all of those before the point.
export const short = (value) => (value == null || !Number.isFinite(value) ? "-" : (Math.abs(value) >= 1000 ? Math.round(value) : Number(value.toPrecision(4))).toLocaleString("en"));
