"use strict";
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const known = new Map();  // a method has one colour in all plots of a kind
  const look = (kind, name) => {
    const names = known.get(kind) ?? [];
    known.set(kind, names);
    if (!names.includes(name)) names.push(name);
    const i = names.indexOf(name);
    return { color: `var(--c${i % 8})`, dash: ["", "7 4", "2 3"][Math.floor(i / 8) % 3] };
  };
  const el = (name, attributes = {}, ...inside) => {
    const node = document.createElement(name);
    for (const [k, v] of Object.entries(attributes)) node.setAttribute(k, v);
    node.append(...inside);
    return node;
  };
  const svg = (name, attributes = {}, text = "") => {
    const node = document.createElementNS(NS, name);
    for (const [k, v] of Object.entries(attributes)) node.setAttribute(k, v);
    if (text) node.textContent = text;
    return node;
  };
  const short = (v) => v === 0 ? "0" : Math.abs(v) >= 1e4 || Math.abs(v) < 1e-4 ? v.toExponential(0) : String(+v.toPrecision(4));

  // --- light and dark
  const root = document.documentElement, button = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const tell = () => { button.textContent = dark() ? "Light" : "Dark"; };
  try { const kept = localStorage.getItem("theme"); if (kept) root.dataset.theme = kept; } catch { /* a page from a file */ }
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* as above */ }
    tell();
  });
  tell();

  // --- axes
  const ticks = (lo, hi, log, many) => {
    if (log) {
      const out = [];
      const decades = Math.log10(hi / lo);
      for (let e = Math.floor(Math.log10(lo)); e <= Math.ceil(Math.log10(hi)); e++)
        for (const m of decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 5]) out.push(m * 10 ** e);
      return out.filter((v) => v >= lo * 0.999 && v <= hi * 1.001);
    }
    const raw = (hi - lo) / many, base = 10 ** Math.floor(Math.log10(raw || 1));
    const step = [1, 2, 5, 10].map((m) => m * base).find((s) => s >= raw) || base;
    const out = [];
    for (let v = Math.ceil(lo / step) * step; v <= hi + step * 1e-6; v += step) out.push(+v.toPrecision(10));
    return out;
  };
  const scale = (lo, hi, log, a, b) => {
    const f = log ? Math.log : (v) => v;
    const width = f(hi) - f(lo) || 1;
    return (v) => a + (b - a) * (f(v) - f(lo)) / width;
  };

  class Plot {
    constructor(figure, spec) {
      Object.assign(this, { figure, spec, view: 0, off: new Set(), at: null });
      this.log = { x: false, y: false };
      this.zoom = Boolean(spec.zoom);
      this.tools = el("div", { class: "tools" });
      this.legend = el("div", { class: "legend", role: "group", "aria-label": "Methods shown" });
      this.svg = svg("svg", { class: "plot", tabindex: "0", role: "img", "aria-label": `${spec.title}. Arrow keys read values.` });
      this.tip = el("div", { class: "tip", "aria-live": "polite", hidden: "" });
      figure.append(this.tools, this.svg, this.legend, this.tip);
      this.choose(0);
      this.controls();
      this.svg.addEventListener("pointermove", (e) => this.point(this.value(e)));
      this.svg.addEventListener("pointerdown", (e) => this.point(this.value(e)));
      this.svg.addEventListener("pointerleave", () => this.point(null));
      this.svg.addEventListener("blur", () => this.point(null));
      this.svg.addEventListener("keydown", (e) => this.key(e));
      new ResizeObserver(() => { if (Math.abs(this.figure.clientWidth - this.drawn) > 2) this.draw(); }).observe(figure);
    }
    choose(i) {
      const view = this.spec.views[i];
      Object.assign(this, { view: i, at: null });
      this.log = { x: Boolean(view.xlog), y: Boolean(view.ylog) };
    }
    look(name) { return look(this.spec.id.split("-")[0], name); }
    get now() { return this.spec.views[this.view]; }
    get shown() { return this.now.series.filter((s) => !this.off.has(s.name)); }
    press(text, on, act) {
      const b = el("button", { type: "button", "aria-pressed": on }, text);
      b.addEventListener("click", () => { act(); this.controls(); this.draw(); });
      return b;
    }
    controls() {
      const focus = this.tools.contains(document.activeElement) || this.legend.contains(document.activeElement)
        ? document.activeElement.textContent : null;
      this.tools.replaceChildren();
      if (this.spec.views.length > 1)
        this.spec.views.forEach((v, i) => this.tools.append(this.press(v.label, i === this.view, () => this.choose(i))));
      for (const axis of ["x", "y"])
        this.tools.append(this.press(`log ${axis}`, this.log[axis], () => { this.log[axis] = !this.log[axis]; }));
      if ("zoom" in this.spec) this.tools.append(this.press("upper part", this.zoom, () => { this.zoom = !this.zoom; }));
      const all = this.now.series.map((s) => s.name);
      this.tools.append(this.press("all", this.off.size === 0, () => this.off.clear()));
      this.tools.append(this.press("none", all.every((n) => this.off.has(n)), () => all.forEach((n) => this.off.add(n))));
      this.legend.replaceChildren(...all.map((name) => {
        const b = this.press(name, !this.off.has(name), () => { this.off.has(name) ? this.off.delete(name) : this.off.add(name); });
        const { color, dash } = this.look(name), swatch = svg("svg", { width: 22, height: 8, "aria-hidden": "true" });
        swatch.append(svg("line", { x1: 0, x2: 22, y1: 4, y2: 4, style: `stroke:${color}`, "stroke-width": 2.5, "stroke-dasharray": dash }));
        b.prepend(swatch);
        return b;
      }));
      if (focus !== null)
        [...this.tools.children, ...this.legend.children].find((b) => b.textContent === focus)?.focus();
    }
    domain() {
      const xs = this.shown.flatMap((s) => s.x).filter((v) => !this.log.x || v > 0);
      const ys = this.shown.flatMap((s) => s.y).filter((v) => !this.log.y || v > 0).sort((a, b) => a - b);
      if (!xs.length || !ys.length) return null;
      let lo = ys[this.zoom ? Math.floor(ys.length * 0.2) : 0], hi = Math.max(...this.shown.flatMap((s) => s.y.map((v, i) => v + s.s[i])));
      if (!this.zoom && !this.log.y) lo = Math.min(...this.shown.flatMap((s) => s.y.map((v, i) => v - s.s[i])));
      if (lo === hi) [lo, hi] = this.log.y ? [lo / 2, hi * 2] : [lo - 0.5, hi + 0.5];
      const room = this.log.y ? (hi / lo) ** 0.05 : (hi - lo) * 0.05;
      [lo, hi] = this.log.y ? [lo / room, hi * room] : [lo - room, hi + room];
      let [a, b] = [Math.min(...xs), Math.max(...xs)];
      if (a === b) b = a + 1;
      return { a, b, lo, hi };
    }
    draw() {
      const W = Math.max(280, this.drawn = this.figure.clientWidth - 34), H = Math.round(Math.min(400, Math.max(250, W * 0.5)));
      const box = { l: 64, r: 12, t: 10, b: 44 };
      this.svg.replaceChildren();
      this.svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
      const d = this.domain();
      this.sx = null;
      if (!d) { this.svg.append(svg("text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, "No method is shown.")); return; }
      const sx = this.sx = scale(d.a, d.b, this.log.x, box.l, W - box.r), sy = scale(d.lo, d.hi, this.log.y, H - box.b, box.t);
      Object.assign(this, { d, box, W, H, sy });
      for (const v of ticks(d.lo, d.hi, this.log.y, 5)) this.svg.append(
        svg("line", { class: "axis", x1: box.l, x2: W - box.r, y1: sy(v), y2: sy(v) }),
        svg("text", { x: box.l - 7, y: sy(v) + 4, "text-anchor": "end" }, short(v)));
      for (const v of ticks(d.a, d.b, this.log.x, W / 90)) this.svg.append(
        svg("text", { x: sx(v), y: H - box.b + 18, "text-anchor": "middle" }, short(v)));
      this.svg.append(svg("text", { x: (box.l + W - box.r) / 2, y: H - 6, "text-anchor": "middle" }, this.now.x),
        svg("text", { x: 12, y: (H - box.b) / 2, transform: `rotate(-90 12 ${(H - box.b) / 2})`, "text-anchor": "middle" }, this.now.y));
      const id = `clip-${this.spec.id}`, clip = svg("clipPath", { id });
      clip.append(svg("rect", { x: box.l - 4, y: box.t, width: W - box.l - box.r + 8, height: H - box.t - box.b }));
      const lines = svg("g", { "clip-path": `url(#${id})` });
      for (const s of this.shown) this.line(lines, s, sx, sy);
      this.svg.append(clip, lines, svg("line", { class: "cursor", y1: box.t, y2: H - box.b, x1: -9, x2: -9 }));
    }
    line(g, s, sx, sy) {
      const { color, dash } = this.look(s.name);
      const ok = s.x.map((x, i) => i).filter((i) => (!this.log.x || s.x[i] > 0) && (!this.log.y || s.y[i] > 0));
      const low = (i) => this.log.y ? Math.max(s.y[i] - s.s[i], s.y[i] / 10) : s.y[i] - s.s[i];
      const path = (at) => at.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
      const top = ok.map((i) => [sx(s.x[i]), sy(s.y[i] + s.s[i])]), bottom = ok.map((i) => [sx(s.x[i]), sy(low(i))]).reverse();
      if (s.s.some((v) => v > 0)) g.append(svg("path", { d: path([...top, ...bottom]) + "Z", style: `fill:${color}`, opacity: 0.08 }));
      g.append(svg("path", { d: path(ok.map((i) => [sx(s.x[i]), sy(s.y[i])])), fill: "none", style: `stroke:${color}`,
        "stroke-width": 2, "stroke-dasharray": dash, "data-name": s.name }));
      if (ok.length <= 12) for (const i of ok) g.append(svg("circle", { cx: sx(s.x[i]), cy: sy(s.y[i]), r: 3, style: `fill:${color}` }));
    }
    value(e) {  // the x under the pointer
      if (!this.sx) return null;
      const r = this.svg.getBoundingClientRect(), px = (e.clientX - r.left) * this.W / r.width;
      const share = (px - this.box.l) / (this.W - this.box.l - this.box.r);
      const f = this.log.x ? Math.log : (v) => v, back = this.log.x ? Math.exp : (v) => v;
      return share < -0.02 || share > 1.02 ? null : back(f(this.d.a) + share * (f(this.d.b) - f(this.d.a)));
    }
    point(x) {
      this.at = x;
      const cursor = this.svg.querySelector(".cursor");
      if (x === null || !this.sx || !cursor) { this.tip.hidden = true; cursor?.setAttribute("x1", -9); cursor?.setAttribute("x2", -9); return; }
      const near = this.shown.map((s) => {
        const i = s.x.reduce((best, v, j) => Math.abs(v - x) < Math.abs(s.x[best] - x) ? j : best, 0);
        return { name: s.name, x: s.x[i], y: s.y[i], s: s.s[i] };
      });
      if (!near.length) return;
      const nearest = near.reduce((best, p) => Math.abs(p.x - x) < Math.abs(best - x) ? p.x : best, near[0].x), px = this.sx(nearest);
      cursor.setAttribute("x1", px); cursor.setAttribute("x2", px);
      near.sort((p, q) => q.y - p.y);
      this.tip.replaceChildren(el("b", {}, `${this.now.x} ${short(nearest)}`), ...near.map((p) => el("div", {},
        el("i", { style: `background:${this.look(p.name).color}` }), `${p.name} ${short(p.y)}${p.s ? ` ± ${short(+p.s.toPrecision(2))}` : ""}`)));
      this.tip.hidden = false;
      const r = this.svg.getBoundingClientRect(), f = this.figure.getBoundingClientRect(), at = r.left - f.left + px * r.width / this.W;
      const wide = this.tip.offsetWidth, left = at + 14 + wide > f.width ? at - wide - 14 : at + 14;
      this.tip.style.left = `${Math.max(4, left)}px`;
      this.tip.style.top = `${r.top - f.top + 8}px`;
    }
    key(e) {
      const xs = [...new Set(this.shown.flatMap((s) => s.x))].sort((a, b) => a - b);
      if (e.key === "Escape") return this.point(null);
      if (!xs.length || !["ArrowLeft", "ArrowRight", "Home", "End"].includes(e.key)) return;
      e.preventDefault();
      const now = this.at === null ? -1 : xs.reduce((best, v, j) => Math.abs(v - this.at) < Math.abs(xs[best] - this.at) ? j : best, 0);
      const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: xs.length - 1 }[e.key];
      this.point(xs[Math.min(xs.length - 1, Math.max(0, to))]);
    }
  }

  for (const spec of JSON.parse(document.getElementById("figures").textContent)) {
    const figure = document.getElementById(spec.id);
    figure.querySelector("noscript")?.remove();
    new Plot(figure, spec).draw();
  }
})();
