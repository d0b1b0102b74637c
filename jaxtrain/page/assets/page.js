// A page is complete without this script, which sorts tables by a click on a heading and reads values of charts.
"use strict";

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, i) => {
    if (!head.textContent) return; // a column of bars
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      // The first click puts the largest number, or the first name, on top.
      const numeric = head.classList.contains("number");
      const [first, second] = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
      const order = head.getAttribute("aria-sort") === first ? second : first;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const value = (row) => (numeric ? Number(row.cells[i].dataset.value) : row.cells[i].textContent);
      const compare = (a, b) => (numeric ? a - b : a.localeCompare(b));
      const rows = [...table.tBodies[0].rows].sort((a, b) => sign * compare(value(a), value(b)));
      table.tBodies[0].append(...rows);
    });
  });
}

// The stops of a cursor: `places` from 0 at the left to 1 at the right, and words(i), the text of a stop.
const alongTexts = (texts) => ({
  places: texts.map((_, i) => (texts.length > 1 ? i / (texts.length - 1) : 0)),
  words: (i) => texts[i],
});

// A stop wherever a curve has a value. Its text names each curve's value there, or the last one before.
const alongCurves = ({ axes, curves }, { axis, from, to }) => {
  const smoothed = document.querySelector("#smooth")?.checked ?? true;
  const shown = curves.filter((curve) => smoothed || curve.kind !== "smooth");
  const stops = [...new Set(shown.flatMap((curve) => curve.x[axis]))].sort((a, b) => a - b);
  const number = (value) => (typeof value === "number" ? String(Number(value.toPrecision(5))) : (value ?? "-"));
  const value = (curve, stop) => {
    const last = curve.x[axis].findLastIndex((place) => place <= stop);
    if (last < 0) return [];
    const earlier = curve.x[axis][last] === stop ? "" : ` (${axes[axis]} ${number(curve.x[axis][last])})`;
    return [`${curve.name} ${number(curve.y[last])}${earlier}`];
  };
  return {
    places: stops.map((stop) => (to > from ? (stop - from) / (to - from) : 0.5)),
    words: (i) => [`${axes[axis]} ${number(stops[i])}`, ...shown.flatMap((curve) => value(curve, stops[i]))].join("\n"),
  };
};

for (const chart of document.querySelectorAll(".chart")) {
  const data = JSON.parse(chart.querySelector("script").textContent);
  const tip = chart.querySelector(".tip");
  let view, cursor, stops;
  let at = 0;

  // The view that the controls have chosen.
  const look = () => {
    const now = [...chart.children].find((child) => child.tagName === "svg" && child.getClientRects().length);
    if (now === view) return;
    view = now;
    cursor = view.querySelector(".cursor");
    const { axis, from, to } = view.dataset;
    stops = Array.isArray(data) ? alongTexts(data) : alongCurves(data, { axis: Number(axis), from: Number(from), to: Number(to) });
  };
  const show = (index) => {
    at = Math.max(0, Math.min(stops.places.length - 1, index));
    const part = stops.places[at];
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, `${100 * part}%`);
    tip.textContent = stops.words(at);
    const box = view.getBoundingClientRect();
    const left = box.left - chart.getBoundingClientRect().left + part * box.width;
    tip.style.left = `${part > 0.5 ? left - tip.offsetWidth - 8 : left + 8}px`;
    cursor.style.visibility = tip.style.visibility = "visible";
  };
  const hide = () => {
    if (cursor) cursor.style.visibility = "hidden";
    tip.style.visibility = "hidden";
  };
  chart.addEventListener("pointermove", (event) => {
    look();
    const box = view.getBoundingClientRect();
    const part = (event.clientX - box.left) / box.width;
    const away = (i) => Math.abs(stops.places[i] - part);
    show(stops.places.reduce((nearest, _, i) => (away(i) < away(nearest) ? i : nearest), 0));
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  document.querySelector(".views")?.addEventListener("change", () => {
    hide();
    view = undefined;
  });
  chart.addEventListener("focus", () => {
    look();
    if (chart.matches(":focus-visible")) show(at);
  });
  chart.addEventListener("keydown", (event) => {
    const all = data.length ?? data.curves.reduce((most, curve) => most + curve.y.length, 0);
    const move = { ArrowLeft: -1, ArrowRight: 1, PageDown: 20, PageUp: -20, Home: -all, End: all }[event.key];
    if (move) {
      event.preventDefault();
      look();
      show(at + move);
    }
  });
}
