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

  // The network: a slider for its phases, and the links of the node that is pointed at.
  function explorable(root) {
    const slider = root.querySelector("input"), status = root.querySelector(".reading");
    const phases = [...root.querySelectorAll(".edges")], nodes = [...root.querySelectorAll(".node")];
    let phase = phases[0];
    const away = () => phase.dataset.away.split(" ").filter(Boolean).map(Number);
    const links = () => [...phase.children].map((path) => [path, ...path.dataset.edge.split("-").map(Number)]);
    function sentence(node) {
      if (away().includes(node)) return `Node ${node} is away`;
      const list = (own, other) => links().filter((l) => l[own] === node).map((l) => `${l[other]} (${l[0].dataset.weight})`).join(", ");
      return `Node ${node} sends to ${list(1, 2) || "nobody"}; receives from ${list(2, 1) || "nobody"}`;
    }
    function choose(node) {
      nodes.forEach((group, k) => group.classList.toggle("chosen", k === node));
      for (const [path, from, to] of links()) {
        const kind = node === null ? "" : from === node ? "out" : to === node ? "in" : "faint";
        path.setAttribute("class", `edge ${kind}`);
      }
      const missing = away().length ? ` ${away().length} away.` : "";
      status.textContent = node === null ? `${phase.children.length} links.${missing} Point at a node to see its own.` : `${sentence(node)}.`;
      if (node !== null) nodes[node].setAttribute("aria-label", sentence(node));
    }
    slider.addEventListener("input", () => {
      phase = phases[Number(slider.value)];
      phases.forEach((each) => each.toggleAttribute("hidden", each !== phase));
      nodes.forEach((group, k) => group.classList.toggle("away", away().includes(k)));
      root.querySelector("output").textContent = phase.dataset.title;
      slider.setAttribute("aria-valuetext", phase.dataset.title);
      choose(null);
    });
    nodes.forEach((group, k) => {
      group.addEventListener("pointerenter", () => choose(k));
      group.addEventListener("focus", () => choose(k));
      for (const name of ["pointerleave", "blur"]) group.addEventListener(name, () => choose(null));
      group.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        const next = nodes[(k + step + nodes.length) % nodes.length];
        group.setAttribute("tabindex", -1);
        next.setAttribute("tabindex", 0);
        next.focus();
      });
    });
    choose(null);
  }

  // Light and dark
  const root = document.documentElement, button = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const name = () => { button.textContent = dark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  system.addEventListener("change", name);
  name();

  JSON.parse(document.getElementById("data").textContent).forEach(readable);
  document.querySelectorAll(".network").forEach(explorable);
  root.dataset.ready = "yes";
})();
