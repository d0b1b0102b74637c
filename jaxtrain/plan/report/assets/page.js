// The page is complete without this: it sorts tables by a click on a heading, and reads values off the memory chart.
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

const chart = document.querySelector(".chart");
if (chart) {
  const points = JSON.parse(document.getElementById("timeline").textContent);
  const plot = chart.querySelector("svg");
  const cursor = chart.querySelector(".cursor");
  const tip = chart.querySelector(".tip");
  let at = 0;

  const show = (index) => {
    at = Math.max(0, Math.min(points.length - 1, index));
    const part = points.length > 1 ? at / (points.length - 1) : 0;
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, `${100 * part}%`);
    tip.textContent = points[at];
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
    show(Math.round(((event.clientX - box.left) / box.width) * (points.length - 1)));
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("focus", () => chart.matches(":focus-visible") && show(at));
  chart.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageDown: 20, PageUp: -20, Home: -points.length, End: points.length }[event.key];
    if (move) {
      event.preventDefault();
      show(at + move);
    }
  });
}
