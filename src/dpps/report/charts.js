"use strict";
// Failures are kept where a reader, or a test, finds them.
window.addEventListener("error", (event) => {
  document.documentElement.dataset.error = event.message;
});

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const NS = "http://www.w3.org/2000/svg";
  const DASHES = ["", "7 4", "2 4", "9 4 2 4"];
  const tone = (k) => `var(--t${k % 6})`;
  // Colours repeat after six, so the dash tells apart what the colour does not.
  const dash = (k) => DASHES[data.compare ? k % DASHES.length : Math.floor(k / 6) % DASHES.length];

  function add(parent, name, attributes = {}, text = null) {
    const made = parent.namespaceURI === NS || name === "svg" ? document.createElementNS(NS, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== null) made.textContent = text;
    parent.append(made);
    return made;
  }

  // Numbers

  const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  function format(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-3) {
      const power = Math.floor(Math.log10(size) + 1e-12);
      const digits = Number((value / 10 ** power).toPrecision(3));
      const exponent = "10" + String(power).replace(/./g, (c) => SUPERSCRIPT[c]);
      return digits === 1 ? exponent : `${digits}×${exponent}`;
    }
    return Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 6 });
  }

  function linearTicks(low, high, count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough * 0.999);
    const first = Math.ceil(low / step - 1e-9), ticks = [];
    for (let k = first; k * step <= high + 1e-9 * step; k++) ticks.push(Number((k * step).toPrecision(12)));
    return ticks;
  }

  function logTicks(low, high) {
    const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
    const every = Math.max(1, Math.ceil((to - from) / 6)), ticks = [];
    const within = to - from > 3 ? [1] : to - from > 2 ? [1, 3] : [1, 2, 5];
    for (let power = from; power <= to; power += every) {
      for (const k of within) {
        const tick = Number((k * 10 ** power).toPrecision(3));
        if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
      }
    }
    return ticks;
  }

  // Where a chart's values lie, with room around them.
  function yScale(chart, height) {
    const values = chart.series.flatMap((s) => s.y).filter((v) => v !== null);
    let low = Math.min(...values), high = Math.max(...values);
    if (chart.log) {
      const room = Math.max((high / low) ** 0.06, high / low < 1.5 ? 2 : 1);
      [low, high] = [low / room, high * room];
      const place = (v) => height * (1 - Math.log(v / low) / Math.log(high / low));
      return { place, ticks: logTicks(low, high) };
    }
    if (chart.key === "epsilon") low = 0;
    const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
    low = low >= 0 ? Math.max(0, low - room) : low - room;
    high = chart.unit === " %" ? Math.min(100, high + room) : high + room;
    if (chart.unit === " %" && high === 100) high = 100.5;
    return { place: (v) => height * (1 - (v - low) / (high - low)), ticks: linearTicks(low, high, 6) };
  }

  // Charts

  class Figure {
    constructor(chart) {
      this.chart = chart;
      this.root = document.getElementById(chart.key);
      this.plot = this.root.querySelector(".plot");
      this.columnar = chart.kind === "strip";
      this.stops = this.columnar ? chart.series.map((_, k) => k) : chart.x;
      this.at = null;
      this.tip = add(this.plot, "div", { class: "tip", hidden: "", "aria-hidden": "true" });
      this.describe();
      this.plot.addEventListener("pointermove", (event) => this.point(event));
      this.plot.addEventListener("pointerdown", (event) => this.point(event));
      this.plot.addEventListener("pointerleave", () => this.move(null));
      this.plot.addEventListener("blur", () => this.move(null));
      this.plot.addEventListener("keydown", (event) => this.key(event));
      new ResizeObserver(() => this.draw()).observe(this.plot);
      this.draw();
    }

    describe() {
      const { chart, plot, stops } = this;
      const last = (s) => s.y.filter((v) => v !== null).at(-1);
      const ends = chart.series.map((s) => `${s.name} ${format(last(s))}${chart.unit}`).join(", ");
      const what = this.columnar ? "" : ` over ${chart.x_label} ${stops[0]} to ${stops.at(-1)}. Last values: ${ends}`;
      const facts = { tabindex: 0, role: "slider", "aria-label": `${chart.title}: ${chart.y_label}${what}. Arrow keys read values.` };
      Object.assign(facts, { "aria-valuemin": 0, "aria-valuemax": stops.length - 1, "aria-valuenow": stops.length - 1, "aria-valuetext": ends });
      for (const [name, value] of Object.entries(facts)) plot.setAttribute(name, value);
    }

    draw() {
      const { chart, plot } = this, width = plot.clientWidth, wide = width >= 430;
      if (width === 0 || width === this.width) return;
      this.width = width;
      this.svg?.remove();
      this.svg = add(plot, "svg", { viewBox: `0 0 ${width} 268`, height: 268, "aria-hidden": "true" });
      const direct = wide && !data.compare && chart.kind === "line" && chart.series.length > 1;
      const scale = yScale(chart, 200);
      const texts = scale.ticks.map((tick) => format(tick));
      const left = 14 + 7 * Math.max(...texts.map((t) => t.length));
      const right = direct ? 12 + 7 * Math.max(...chart.series.map((s) => s.name.length)) : 12;
      this.area = { left, top: 30, width: width - left - right, height: 200 };
      this.y = (value) => this.area.top + scale.place(value);
      this.frame(scale.ticks, texts);
      chart.series.forEach((series, k) => (this[chart.kind] ?? this.line).call(this, series, k));
      if (direct) this.labels();
      this.legend(!direct && !this.columnar && chart.series.length > 1);
      this.cursor = add(this.svg, "g");
      this.move(this.at);
    }

    x(k) {
      const { left, width } = this.area, first = this.chart.x[0], last = this.chart.x.at(-1);
      if (this.columnar) return left + (width * (k + 0.5)) / this.stops.length;
      if (this.chart.kind === "dots") return left + (width * (k + 0.5)) / this.stops.length;
      return last === first ? left + width / 2 : left + (width * (this.chart.x[k] - first)) / (last - first);
    }

    frame(ticks, texts) {
      const { svg, chart, area } = this, bottom = area.top + area.height;
      add(svg, "text", { x: 0, y: 12 }, chart.y_label + (chart.log ? ", log scale" : ""));
      ticks.forEach((tick, k) => {
        add(svg, "line", { class: "grid", x1: area.left, x2: area.left + area.width, y1: this.y(tick), y2: this.y(tick) });
        add(svg, "text", { x: area.left - 8, y: this.y(tick) + 4, "text-anchor": "end" }, texts[k]);
      });
      add(svg, "line", { class: "axis", x1: area.left, x2: area.left + area.width, y1: bottom, y2: bottom });
      if (this.columnar) return this.columns(bottom);
      const first = chart.x[0], last = chart.x.at(-1), dots = chart.kind === "dots";
      const shown = first === last ? [first] : linearTicks(first, last, Math.max(2, Math.min(8, area.width / 60))).filter(Number.isInteger);
      for (const tick of shown) {
        const at = dots ? this.x(chart.x.indexOf(tick)) : first === last ? this.x(0) : area.left + (area.width * (tick - first)) / (last - first);
        add(svg, "text", { x: at, y: bottom + 17, "text-anchor": "middle" }, format(tick));
      }
      add(svg, "text", { x: area.left + area.width, y: bottom + 35, "text-anchor": "end" }, chart.x_label);
    }

    columns(bottom) {
      const room = this.area.width / this.stops.length / 7;
      this.chart.series.forEach((series, k) => {
        const name = series.name.length > room ? `${series.name.slice(0, Math.max(1, room - 1))}…` : series.name;
        add(this.svg, "text", { x: this.x(k), y: bottom + 17, "text-anchor": "middle" }, name);
      });
    }

    line(series, k) {
      const points = series.y.map((v, i) => [this.x(i), v]).filter(([, v]) => v !== null).map(([x, v]) => [x, this.y(v)]);
      const d = points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
      add(this.svg, "path", { class: "line series", d, stroke: tone(series.tone), "stroke-dasharray": dash(k) });
      if (points.length <= 25) for (const [x, y] of points) add(this.svg, "circle", { cx: x, cy: y, r: 2.75, fill: tone(series.tone) });
    }

    dots(series) {
      const values = series.y.filter((v) => v !== null), mean = values.reduce((a, b) => a + b, 0) / values.length;
      const { left, width } = this.area, shift = (series.tone - (this.chart.series.length - 1) / 2) * 6, base = this.y(mean);
      add(this.svg, "path", { class: "mean series", d: `M${left} ${base}H${left + width}`, stroke: tone(series.tone) });
      series.y.forEach((value, k) => {
        if (value === null) return;
        const at = this.x(k) + shift, radius = Math.min(4.5, Math.max(1.2, width / this.stops.length / 3));
        add(this.svg, "line", { x1: at, x2: at, y1: base, y2: this.y(value), stroke: tone(series.tone), opacity: 0.45 });
        add(this.svg, "circle", { cx: at, cy: this.y(value), r: radius, fill: tone(series.tone) });
      });
    }

    strip(series) {
      const values = series.y.filter((v) => v !== null), mean = values.reduce((a, b) => a + b, 0) / values.length;
      const at = this.x(this.chart.series.indexOf(series)), half = Math.min(28, this.area.width / this.stops.length / 3);
      values.forEach((value, k) => {
        const aside = half * 0.75 * Math.sin(2.4 * k);
        add(this.svg, "circle", { cx: at + aside, cy: this.y(value), r: values.length > 60 ? 2 : 3.5, fill: tone(series.tone), opacity: 0.65 });
      });
      add(this.svg, "path", { class: "bar series", d: `M${at - half} ${this.y(mean)}H${at + half}`, stroke: tone(series.tone) });
    }

    // Names at the ends of the lines, pushed apart where they would overlap.
    labels() {
      const { chart, area } = this;
      const ends = chart.series.map((s) => ({ s, y: this.y(s.y.filter((v) => v !== null).at(-1)) })).sort((a, b) => a.y - b.y);
      ends.forEach((end, k) => { if (k) end.y = Math.max(end.y, ends[k - 1].y + 15); });
      const over = Math.max(0, ends.at(-1).y - (area.top + area.height));
      for (const { s, y } of ends) {
        add(this.svg, "text", { class: "label", x: area.left + area.width + 8, y: y - over + 4, style: `fill:${tone(s.tone)}` }, s.name);
      }
    }

    legend(shown) {
      const box = this.root.querySelector(".legend");
      box.replaceChildren();
      if (!shown) return;
      this.chart.series.forEach((series, k) => {
        const entry = add(box, "span"), key = add(entry, "svg", { width: 26, height: 10, "aria-hidden": "true" });
        add(key, "line", { x1: 1, x2: 25, y1: 5, y2: 5, stroke: tone(series.tone), "stroke-width": 2, "stroke-dasharray": dash(k) });
        entry.append(series.name);
      });
    }

    // Reading values

    point(event) {
      const x = event.clientX - this.plot.getBoundingClientRect().left;
      let best = 0;
      this.stops.forEach((_, k) => { if (Math.abs(this.x(k) - x) < Math.abs(this.x(best) - x)) best = k; });
      this.move(best);
    }

    key(event) {
      const last = this.stops.length - 1, jump = Math.max(1, Math.round(last / 10)), now = this.at ?? last;
      const to = { ArrowRight: now + 1, ArrowUp: now + 1, ArrowLeft: now - 1, ArrowDown: now - 1, Home: 0, End: last, PageUp: now + jump, PageDown: now - jump }[event.key];
      if (event.key === "Escape") return this.move(null);
      if (to === undefined) return undefined;
      event.preventDefault();
      return this.move(this.at === null && event.key.startsWith("Arrow") ? last : Math.max(0, Math.min(last, to)));
    }

    reading(k) {
      const { chart } = this;
      if (!this.columnar) return chart.series.filter((s) => s.y[k] !== null).map((s) => [s, format(s.y[k]) + chart.unit]);
      const series = chart.series[k], values = series.y.filter((v) => v !== null);
      const mean = values.reduce((a, b) => a + b, 0) / values.length;
      return [[series, `mean ${format(mean)}, ${format(Math.min(...values))} to ${format(Math.max(...values))}${chart.unit}`]];
    }

    move(k) {
      this.at = k;
      this.cursor?.replaceChildren();
      this.tip.hidden = k === null;
      if (k === null) return;
      const { chart, area, tip } = this, rows = this.reading(k), x = this.x(k);
      const head = this.columnar ? "" : `${chart.x_label} ${format(chart.x[k])}`;
      add(this.cursor, "line", { class: "cursor", x1: x, x2: x, y1: area.top, y2: area.top + area.height });
      tip.replaceChildren();
      if (head) add(tip, "b", {}, head);
      for (const [series, text] of rows) {
        const row = add(tip, "div");
        add(row, "span", { class: "key", style: `background:${tone(series.tone)}` });
        row.append(this.columnar || chart.series.length > 1 ? `${series.name}: ${text}` : text);
        if (chart.kind === "line") add(this.cursor, "circle", { cx: x, cy: this.y(series.y[k]), r: 4, fill: tone(series.tone) });
      }
      const room = this.width - tip.offsetWidth;
      tip.style.left = `${Math.max(0, Math.min(room, x + (x > this.width / 2 ? -tip.offsetWidth - 12 : 12)))}px`;
      tip.style.top = `${area.top}px`;
      this.plot.setAttribute("aria-valuenow", k);
      this.plot.setAttribute("aria-valuetext", `${head} ${rows.map(([s, text]) => `${s.name} ${text}`).join(", ")}`);
    }
  }

  // The network of one phase: nodes on a circle, counted clockwise from the top.

  class Network {
    constructor(drawn, k) {
      this.drawn = drawn;
      this.root = document.getElementById(`network-${k}`);
      this.slider = this.root.querySelector("input");
      this.title = this.root.querySelector("output");
      this.status = this.root.querySelector(".reading");
      this.chosen = null;
      this.radius = drawn.nodes <= 24 ? 14 : drawn.nodes <= 64 ? 8 : 3;
      const svg = add(this.root.querySelector(".plot"), "svg", { viewBox: "-200 -200 400 400", role: "group", "aria-label": `Network of ${drawn.nodes} nodes` });
      this.heads(svg, k);
      this.edges = add(svg, "g", { class: "edges" });
      this.nodes = Array.from({ length: drawn.nodes }, (_, node) => this.node(svg, node));
      this.slider.addEventListener("input", () => this.draw());
      svg.addEventListener("pointerleave", () => this.choose(null));
      this.draw();
    }

    heads(svg, k) {
      this.marker = (kind) => `url(#head-${k}-${kind})`;
      const defs = add(svg, "defs");
      for (const [kind, fill] of [["plain", "var(--soft)"], ["out", tone(0)], ["in", tone(1)]]) {
        const marker = add(defs, "marker", { id: `head-${k}-${kind}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" });
        add(marker, "path", { d: "M0 0.8L8 4L0 7.2Z", fill });
      }
    }

    place(node, size = 176) {
      const angle = (2 * Math.PI * node) / this.drawn.nodes - Math.PI / 2;
      return [size * Math.cos(angle), size * Math.sin(angle)];
    }

    node(svg, node) {
      const [x, y] = this.place(node), group = add(svg, "g", { tabindex: node ? -1 : 0, role: "button" });
      add(group, "circle", { cx: x, cy: y, r: this.radius });
      if (this.radius > 7) add(group, "text", { x, y: y + 4, "text-anchor": "middle", style: `font-size:${this.radius > 10 ? 12 : 9}px` }, node);
      group.addEventListener("pointerenter", () => this.choose(node));
      group.addEventListener("focus", () => this.choose(node));
      group.addEventListener("blur", () => this.choose(null));
      group.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        const next = this.nodes[(node + step + this.nodes.length) % this.nodes.length];
        group.setAttribute("tabindex", -1);
        next.setAttribute("tabindex", 0);
        next.focus();
      });
      return group;
    }

    draw() {
      this.phase = this.drawn.phases[Number(this.slider.value)];
      this.title.textContent = this.phase.title;
      this.slider.setAttribute("aria-valuetext", this.phase.title);
      this.edges.replaceChildren();
      this.paths = this.phase.edges.map(([from, to, weight]) => {
        const path = add(this.edges, "path", { class: "edge", d: this.curve(from, to), "stroke-width": 0.8 + 1.6 * weight, "data-edge": `${from}-${to}` });
        return { from, to, weight, path };
      });
      this.nodes.forEach((group, node) => {
        group.classList.toggle("away", this.phase.away.includes(node));
        group.setAttribute("aria-label", this.sentence(node));
      });
      this.choose(this.chosen);
    }

    // Bent a little to the right, so that a link and the one back do not lie on each other.
    curve(from, to) {
      const [x1, y1] = this.place(from), [x2, y2] = this.place(to);
      const dx = x2 - x1, dy = y2 - y1, length = Math.hypot(dx, dy), bend = Math.min(26, 0.14 * length);
      const [mx, my] = [(x1 + x2) / 2 + (bend * dy) / length, (y1 + y2) / 2 - (bend * dx) / length];
      const trim = (x, y) => { const l = Math.hypot(mx - x, my - y), r = this.radius + 3; return [x + (r * (mx - x)) / l, y + (r * (my - y)) / l]; };
      const [ax, ay] = trim(x1, y1), [bx, by] = trim(x2, y2);
      return `M${ax.toFixed(1)} ${ay.toFixed(1)}Q${mx.toFixed(1)} ${my.toFixed(1)} ${bx.toFixed(1)} ${by.toFixed(1)}`;
    }

    sentence(node) {
      if (this.phase.away.includes(node)) return `Node ${node} is away`;
      const list = (edges, end) => edges.map((e) => `${e[end]} (${format(e.weight)})`).join(", ") || "nobody";
      const out = this.paths.filter((e) => e.from === node), into = this.paths.filter((e) => e.to === node);
      return `Node ${node} sends to ${list(out, "to")}; receives from ${list(into, "from")}`;
    }

    choose(node) {
      this.chosen = node;
      this.nodes.forEach((group, k) => group.classList.toggle("chosen", k === node));
      for (const { from, to, path } of this.paths) {
        const kind = node === null ? "plain" : from === node ? "out" : to === node ? "in" : "plain";
        path.setAttribute("class", `edge ${kind}${node !== null && kind === "plain" ? " faint" : ""}`);
        if (this.drawn.nodes <= 64 || kind !== "plain") path.setAttribute("marker-end", this.marker(kind));
        else path.removeAttribute("marker-end");
      }
      const away = this.phase.away.length ? ` ${this.phase.away.length} away.` : "";
      this.status.textContent = node === null ? `${this.paths.length} links.${away} Point at a node to see its own.` : `${this.sentence(node)}.`;
    }
  }

  // Light and dark

  const button = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const show = () => { button.textContent = dark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    show();
  });
  system.addEventListener("change", show);
  show();

  document.querySelectorAll(".key[data-tone]").forEach((key) => { key.style.background = tone(Number(key.dataset.tone)); });
  data.charts.forEach((chart) => new Figure(chart));
  data.networks.forEach((drawn, k) => new Network(drawn, k));
  document.documentElement.dataset.ready = "yes";
})();
