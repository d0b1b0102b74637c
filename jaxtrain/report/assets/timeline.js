// Draws the lanes of a step on a canvas. A drag, the wheel with Ctrl, and the buttons change the window.
"use strict";

for (const figure of document.querySelectorAll(".timeline")) {
  const { ns, kinds, labels, lanes } = JSON.parse(figure.querySelector("script").textContent);
  const canvas = figure.querySelector("canvas");
  const tip = figure.querySelector(".tip");
  const controls = figure.querySelector(".controls");
  const [LANE, NAME, BAR, AXIS] = [44, 15, 24, 24]; // heights in px: a lane, the name above its bar, the bar, the axis
  const FONT = "12px system-ui, sans-serif";
  const shown = document.createElement("span");
  shown.setAttribute("aria-live", "polite");
  let [from, to] = [0, ns];
  let selected = null; // px of a drag: where it began, where it is

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const xOf = (time) => ((time - from) / (to - from)) * canvas.clientWidth;
  const timeOf = (x) => from + (x / canvas.clientWidth) * (to - from);
  const milliseconds = (time, digits = 4) => `${Number((time / 1e6).toPrecision(digits))} ms`;

  // White or black, for the better contrast.
  const inkOn = (colour) => {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    return 0.3 * red + 0.59 * green + 0.11 * blue > 140 ? "#000" : "#fff";
  };

  // The text, or the beginning of it with an ellipsis, in this width; "" if fewer than four letters are left.
  const fitting = (pen, text, width) => {
    if (width < 24 || pen.measureText(text).width <= width) return width < 24 ? "" : text;
    let [fits, length] = [0, text.length];
    while (length - fits > 1) {
      const middle = (fits + length) >> 1;
      if (pen.measureText(`${text.slice(0, middle)}\u2026`).width <= width) fits = middle;
      else length = middle;
    }
    return fits > 3 ? `${text.slice(0, fits)}\u2026` : "";
  };

  const ticks = () => {
    const most = Math.max(2, canvas.clientWidth / 110);
    const power = 10 ** Math.floor(Math.log10((to - from) / most));
    const step = power * ([1, 2, 5, 10].find((m) => (to - from) / (m * power) <= most) ?? 10);
    const found = [];
    for (let time = Math.ceil(from / step) * step; time <= to; time += step) found.push(time);
    return found;
  };

  const draw = () => {
    const width = canvas.clientWidth;
    const height = lanes.length * LANE + AXIS;
    const scale = devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = FONT;
    const [ink, quiet, rule, panel] = ["--ink", "--quiet", "--rule", "--panel"].map(style);
    const colours = kinds.map(([, name]) => style(name));
    const inks = colours.map(inkOn);
    pen.fillStyle = panel;
    lanes.forEach((_, n) => pen.fillRect(0, n * LANE + NAME, width, BAR));
    const bottom = lanes.length * LANE;
    for (const time of ticks()) {
      const x = xOf(time);
      const text = milliseconds(time, 6);
      const wide = pen.measureText(text).width;
      pen.fillStyle = rule;
      pen.fillRect(x, 0, 1, bottom);
      pen.fillStyle = quiet;
      pen.fillText(text, Math.max(0, Math.min(width - wide, x - wide / 2)), bottom + 16);
    }
    lanes.forEach(({ name, events }, n) => {
      const top = n * LANE + NAME;
      pen.fillStyle = quiet;
      pen.fillText(name, 0, top - 4, width);
      for (let i = 0; i < events.length; i += 4) {
        const [start, took] = [events[i], events[i + 1]];
        if (start > to || start + took < from) continue;
        const [kind, label] = [events[i + 2], events[i + 3]];
        const left = Math.max(0, xOf(start));
        const wide = Math.min(width, xOf(start + took)) - left;
        pen.fillStyle = colours[kind];
        pen.fillRect(left, top, Math.max(wide - (wide > 3 ? 1 : 0), 0.5), BAR);
        const text = fitting(pen, labels[label] || kinds[kind][0], wide - 8);
        if (text) {
          pen.fillStyle = inks[kind];
          pen.fillText(text, left + 4, top + 16);
        }
      }
    });
    if (selected) {
      pen.globalAlpha = 0.2;
      pen.fillStyle = ink;
      pen.fillRect(Math.min(...selected), 0, Math.abs(selected[1] - selected[0]), bottom);
    }
    shown.textContent = `${milliseconds(from)} to ${milliseconds(to)} of ${milliseconds(ns)}`;
  };

  const show = (start, end) => {
    const length = Math.min(ns, Math.max(100, end - start));
    from = Math.max(0, Math.min(ns - length, start));
    to = from + length;
    tip.style.visibility = "hidden";
    draw();
  };
  const zoom = (factor, centre = (from + to) / 2) => show(centre - (centre - from) * factor, centre + (to - centre) * factor);
  const move = (share) => show(from + share * (to - from), to + share * (to - from));
  const actions = [
    ["+", "zoom in", () => zoom(0.5)],
    ["\u2212", "zoom out", () => zoom(2)],
    ["\u25c0", "earlier", () => move(-0.5)],
    ["\u25b6", "later", () => move(0.5)],
    ["whole step", "whole step", () => show(0, ns)],
  ];
  for (const [text, name, act] of actions) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.setAttribute("aria-label", name);
    button.addEventListener("click", act);
    controls.append(button);
  }
  controls.append(shown, " Drag over a range to zoom.");

  // An event within 2 px of the pointer: kernels can be narrower than a pixel.
  const eventAt = (x, y) => {
    const lane = lanes[Math.floor(y / LANE)];
    const time = timeOf(x);
    const near = (2 * (to - from)) / canvas.clientWidth;
    let best = null;
    for (let i = 0; lane && i < lane.events.length; i += 4) {
      const [start, took] = [lane.events[i], lane.events[i + 1]];
      const away = Math.max(start - time, time - start - took, 0);
      if (away <= near && (!best || away < best.away)) best = { away, event: lane.events.slice(i, i + 4) };
    }
    return best?.event;
  };

  canvas.addEventListener("pointermove", (pointer) => {
    const [x, y] = [pointer.offsetX, pointer.offsetY];
    if (selected) {
      selected[1] = x;
      draw();
    }
    const event = selected ? null : eventAt(x, y);
    tip.style.visibility = event ? "visible" : "hidden";
    if (!event) return;
    const [start, took, kind, label] = event;
    tip.textContent = [labels[label], `${kinds[kind][0]}: ${milliseconds(took)} from ${milliseconds(start)}`]
      .filter(Boolean).join("\n");
    const left = x > canvas.clientWidth / 2 ? x - tip.offsetWidth - 10 : x + 10;
    tip.style.left = `${Math.max(0, Math.min(canvas.clientWidth - tip.offsetWidth, left))}px`;
    tip.style.top = `${canvas.offsetTop + (Math.floor(y / LANE) + 1) * LANE}px`;
  });
  canvas.addEventListener("pointerdown", (pointer) => {
    if (pointer.button || pointer.pointerType === "touch") return;
    canvas.setPointerCapture(pointer.pointerId);
    selected = [pointer.offsetX, pointer.offsetX];
  });
  canvas.addEventListener("pointerup", () => {
    const [left, right] = [...(selected ?? [0, 0])].sort((a, b) => a - b);
    selected = null;
    if (right - left > 4) show(timeOf(left), timeOf(right));
    else draw();
  });
  canvas.addEventListener("pointerleave", () => (tip.style.visibility = "hidden"));
  canvas.addEventListener("wheel", (wheel) => {
    if (!wheel.ctrlKey) return;
    wheel.preventDefault();
    zoom(wheel.deltaY < 0 ? 0.8 : 1.25, timeOf(wheel.offsetX));
  }, { passive: false });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
  new ResizeObserver(draw).observe(figure);
}
