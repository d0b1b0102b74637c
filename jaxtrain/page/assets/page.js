// The page is complete without this: it sorts tables by a click on a heading, and reads values off its charts.
"use strict";

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      // Numbers are wanted largest first, names from the start.
      const numeric = head.classList.contains("number");
      const first = numeric ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? (numeric ? "ascending" : "descending") : first;
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

// What a cursor can say: `places` are its stops, from 0 at the left to 1 at the right, and words(i) what is said at one of them.
const alongWords = (words) => ({
  places: words.map((_, i) => (words.length > 1 ? i / (words.length - 1) : 0)),
  words: (i) => words[i],
});

// At each place where any curve has a value, what every curve has there, or had last.
const alongCurves = ({ x, from, to, curves }) => {
  const stops = [...new Set(curves.flatMap((curve) => curve.at))].sort((a, b) => a - b);
  const number = (value) => (typeof value === "number" ? String(Number(value.toPrecision(5))) : (value ?? "-"));
  const said = (curve, stop) => {
    const last = curve.at.findLastIndex((place) => place <= stop);
    if (last < 0) return [];
    const earlier = curve.at[last] === stop ? "" : ` (${x} ${number(curve.at[last])})`;
    return [`${curve.name} ${number(curve.is[last])}${earlier}`];
  };
  return {
    places: stops.map((stop) => (to > from ? (stop - from) / (to - from) : 0)),
    words: (i) => [`${x} ${number(stops[i])}`, ...curves.flatMap((curve) => said(curve, stops[i]))].join("\n"),
  };
};

for (const chart of document.querySelectorAll(".chart")) {
  const points = JSON.parse(chart.querySelector("script").textContent);
  const { places, words } = Array.isArray(points) ? alongWords(points) : alongCurves(points);
  const plot = chart.querySelector("svg");
  const cursor = chart.querySelector(".cursor");
  const tip = chart.querySelector(".tip");
  let at = 0;

  const show = (index) => {
    at = Math.max(0, Math.min(places.length - 1, index));
    const part = places[at];
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, `${100 * part}%`);
    tip.textContent = words(at);
    const box = plot.getBoundingClientRect();
    const left = box.left - chart.getBoundingClientRect().left + part * box.width;
    tip.style.left = `${part > 0.5 ? left - tip.offsetWidth - 8 : left + 8}px`;
    cursor.style.visibility = tip.style.visibility = "visible";
  };
  const hide = () => {
    cursor.style.visibility = tip.style.visibility = "hidden";
  };
  chart.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const part = (event.clientX - box.left) / box.width;
    const away = (i) => Math.abs(places[i] - part);
    show(places.reduce((nearest, _, i) => (away(i) < away(nearest) ? i : nearest), 0));
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("focus", () => chart.matches(":focus-visible") && show(at));
  chart.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageDown: 20, PageUp: -20, Home: -places.length, End: places.length }[event.key];
    if (move) {
      event.preventDefault();
      show(at + move);
    }
  });
}
