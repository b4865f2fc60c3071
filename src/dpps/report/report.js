"use strict";
// Failures are kept where a reader, or a test, finds them.
window.addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });

(() => {
  function add(parent, name, text = "") {
    const made = parent.appendChild(document.createElement(name));
    made.textContent = text;
    return made;
  }

  // The values of a chart, by pointer and by keyboard.
  function readable(chart) {
    const area = document.querySelector(`#${chart.key} .area`), last = chart.at.length - 1;
    const line = add(area, "div"), tip = add(area, "div");
    [line.className, tip.className, line.hidden, tip.hidden] = ["cursor", "tip", true, true];
    let now = null;
    function show(k) {
      now = k;
      line.hidden = tip.hidden = k === null;
      if (k === null) return;
      const rows = chart.series.filter((s) => s.y[k]);
      tip.replaceChildren();
      add(tip, "b", chart.x[k]);
      for (const series of rows) {
        const row = add(tip, "div"), key = add(row, "span");
        key.className = "key";
        key.style.background = series.colour;
        row.append(chart.series.length > 1 ? `${series.name}: ${series.y[k]}` : series.y[k]);
      }
      const x = (chart.at[k] / 1000) * area.clientWidth, room = area.clientWidth - tip.offsetWidth;
      line.style.left = `${x}px`;
      tip.style.left = `${Math.min(room, Math.max(0, x + (x > area.clientWidth / 2 ? -tip.offsetWidth - 10 : 10)))}px`;
      area.setAttribute("aria-valuenow", k);
      area.setAttribute("aria-valuetext", [chart.x[k], ...rows.map((s) => `${s.name} ${s.y[k]}`)].join(", "));
    }
    const point = (event) => {
      const box = area.getBoundingClientRect(), x = (1000 * (event.clientX - box.left)) / box.width;
      show(chart.at.reduce((best, at, k) => (Math.abs(at - x) < Math.abs(chart.at[best] - x) ? k : best), 0));
    };
    area.addEventListener("pointermove", point);
    area.addEventListener("pointerdown", point);
    for (const name of ["pointerleave", "blur"]) area.addEventListener(name, () => show(null));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return show(null);
      const from = now ?? last + 1;
      const to = { ArrowRight: from + 1, ArrowUp: from + 1, ArrowLeft: from - 1, ArrowDown: from - 1, Home: 0, End: last }[event.key];
      if (to === undefined) return undefined;
      event.preventDefault();
      return show(Math.max(0, Math.min(last, to)));
    });
  }

  // Light and dark
  const root = document.documentElement, button = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const name = () => { button.textContent = dark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  system.addEventListener("change", name);
  name();

  JSON.parse(document.getElementById("data").textContent).forEach(readable);
  root.dataset.ready = "yes";
})();
