// This script draws the line charts of a page, shows their values at a cursor, and sorts tables by a click on a heading. All line
// charts share the cursor, the range of the x axis, and which curves are hidden.
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

// ---- Axes

const UNITS = [[1e12, 1e12, "T"], [1e9, 1e9, "B"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]];
const short = (value) => {
  const [, size, letter] = UNITS.find(([least]) => Math.abs(value) >= least) ?? [0, 1, ""];
  return `${Number((value / size).toPrecision(10))}${letter}`;
};
const ticks = (low, high, most = 5) => {
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const count = (step) => Math.floor(high / step) - Math.ceil(low / step);
  const step = power * [1, 2, 2.5, 5, 10, 20].find((m) => count(m * power) < most);
  return Array.from({ length: count(step) + 1 }, (_, i) => (Math.ceil(low / step) + i) * step);
};
const logTicks = (low, high, most = 6) => {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const decades = Array.from({ length: last - first + 1 }, (_, i) => first + i);
  let found = [];
  for (const digits of [[1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 5], [1, 3], [1]]) {
    found = decades.flatMap((d) => digits.map((m) => m * 10 ** d)).filter((v) => low <= v && v <= high);
    if (found.length <= most) return found.length > 1 ? found : ticks(low, high, most);
  }
  return found.filter((_, i) => i % Math.ceil(found.length / most) === 0);
};

// The range of the y axis for these values, with 6% of space at both ends, but no space below 0 if the axis starts there.
const yRange = (values, zero, log) => {
  let low = values.reduce((a, b) => Math.min(a, b));
  const high = values.reduce((a, b) => Math.max(a, b));
  if (log) {
    const factor = high > low ? (high / low) ** 0.06 : 1.5;
    return [low / factor, high * factor];
  }
  if (zero) low = Math.min(0, low);
  const space = 0.06 * (high - low) || 0.06 * Math.abs(high) || 1;
  return [zero && low === 0 ? low : low - space, high + space];
};

// The position of a value as a fraction of an axis.
const scale = ([low, high], log = false) => {
  if (high === low) return () => 0.5;
  return log ? (v) => Math.log(v / low) / Math.log(high / low) : (v) => (v - low) / (high - low);
};

const SVG = document.querySelector("svg")?.namespaceURI;
const make = (name, attributes, text = "") => {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
};

const axes = ([from, to], [low, high], log, name) => {
  const [x, y] = [scale([from, to]), scale([low, high], log)];
  const found = (log ? logTicks : ticks)(low, high).flatMap((level) => {
    const at = `${100 * (1 - y(level))}%`;
    return [make("line", { class: "grid", x1: 0, x2: "100%", y1: at, y2: at }),
      make("text", { class: "axis", x: -8, y: at, dy: 4, "text-anchor": "end" }, short(level))];
  });
  let places = to > from ? ticks(from, to).filter((place) => name !== "step" || Number.isInteger(place)) : [from];
  if (to > from && x(places[0]) > 0.2) places = [from, ...places];
  places.forEach((place, i) => {
    const at = `${100 * x(place)}%`;
    const anchor = x(place) < 0.05 ? "start" : x(place) > 0.95 ? "end" : "middle";
    found.push(make("line", { class: "grid", x1: at, x2: at, y1: "100%", y2: "102%" }),
      make("text", { class: "axis", x: at, y: "100%", dy: 18, "text-anchor": anchor }, (i ? "" : `${name} `) + short(place)));
  });
  return found;
};

// ---- Charts

const number = (value) => (typeof value === "number" ? String(Number(value.toPrecision(5))) : (value ?? "-"));
const checked = (id) => document.getElementById(id)?.checked ?? false;
const axisNow = () => Number(document.querySelector(".views [name=x]:checked")?.value ?? 0);
const zoomed = []; // x axis -> its visible range, if that is a part
const hidden = new Set(); // names in legends
const DOTS = 40; // a curve with at most this number of points has a dot at each point
const MARKED = 40; // largest number of NaN and infinite values of a curve that are marked

// What a cursor needs of a chart whose stops have texts, and the values of its parts, "" for parts that are not there.
const ofTexts = (chart, { texts, parts }) => ({
  svg: chart.querySelector("svg"),
  range: () => [0, texts.length - 1],
  stops: () => texts.map((_, i) => i),
  words: (i) => [texts[i], ...parts.flatMap(([name, values]) => (values[i] ? `${name} ${values[i]}` : []))].join("\n"),
});

// The same for a line chart, which has a stop wherever a shown curve has a value, and `draw`.
const ofCurves = (chart, { axes: names, curves: all, zero, log: mayLog }) => {
  const [svg, curves] = [chart.querySelector("svg"), all.filter((c) => c.kind !== "limit")];
  const limits = all.filter((c) => c.kind === "limit").map((c) => c.y[0]);
  const [grid, marks] = [make("g", { class: "axes" }), make("g", {})];
  const plot = make("svg", { width: "100%", height: "100%", viewBox: "0 0 1000 1000", preserveAspectRatio: "none" });
  svg.append(grid, plot, marks, make("line", { class: "cursor", x1: 0, x2: 0, y1: 0, y2: "100%" }));
  const full = () => {
    const known = curves.map((c) => c.x[axisNow()]).filter((at) => at.length);
    return [Math.min(...known.map((at) => at[0])), Math.max(...known.map((at) => at.at(-1)))];
  };
  const range = () => zoomed[axisNow()] ?? full();
  const shown = () => curves.filter((c) => !hidden.has(c.legend) && (c.kind !== "smooth" || checked("smooth")));
  let levels; // the range of the y axis

  // All numbers of the curves in a range of x, also where a curve crosses an end of the range.
  const inside = (axis, [from, to]) => curves.filter((c) => !hidden.has(c.legend)).flatMap(({ x, y }) => {
    const at = x[axis];
    return y.flatMap((value, i) => {
      if (typeof value !== "number") return [];
      const found = from <= at[i] && at[i] <= to ? [value] : [];
      for (const end of typeof y[i + 1] === "number" ? [from, to] : [])
        if (at[i] < end && end < at[i + 1]) found.push(value + ((y[i + 1] - value) * (end - at[i])) / (at[i + 1] - at[i]));
      return found;
    });
  });
  const draw = () => {
    const [axis, log, visible] = [axisNow(), mayLog && checked("log"), range()];
    const values = inside(axis, visible);
    if (values.length) levels = yRange([...values, ...limits], zero, log);
    if (!levels) return;
    const [x, y] = [scale(visible), scale(levels, log)];
    grid.replaceChildren(...axes(visible, levels, log, names[axis]));
    plot.setAttribute("overflow", zoomed[axis] ? "hidden" : "visible");
    const known = ({ y: found }, i) => typeof found[i] === "number";
    const paths = [...shown()].sort((a, b) => (b.kind === "raw") - (a.kind === "raw")).map((c) => {
      const point = (value, i) => `${known(c, i - 1) ? " " : "M"}${1000 * x(c.x[axis][i])} ${1000 * (1 - y(value))}`;
      const d = c.y.map((value, i) => (known(c, i) ? point(value, i) : "")).join("");
      return make("path", { class: `curve ${c.kind}`, "data-curve": curves.indexOf(c), style: `stroke:${c.colour}`, d });
    });
    paths.push(...limits.map((limit) => {
      const at = 1000 * (1 - y(limit));
      return make("path", { class: "curve limit", style: "stroke:var(--ink)", d: `M0 ${at} 1000 ${at}` });
    }));
    plot.replaceChildren(...paths);
    marks.replaceChildren(...shown().flatMap((c) => {
      const few = c.y.length <= DOTS && c.kind !== "raw";
      let lost = 0;
      return c.y.flatMap((value, i) => {
        const place = x(c.x[axis][i]);
        const at = `${100 * place}%`;
        if (value === null || !(place >= 0 && place <= 1)) return [];
        if (known(c, i)) {
          const alone = !known(c, i - 1) && !known(c, i + 1);
          if (!few && !alone) return [];
          return [make("circle", { cx: at, cy: `${100 * (1 - y(value))}%`, r: 2.6, style: `fill:${c.colour}` })];
        }
        if (++lost > MARKED) return [];
        const line = make("line", { class: "lost", x1: at, x2: at, y1: 0, y2: "100%" });
        line.append(make("title", {}, `${c.name}: ${value} at ${number(c.x[axis][i])}`));
        return [line];
      });
    }));
  };
  const value = (curve, stop) => {
    const at = curve.x[axisNow()];
    const last = at.findLastIndex((place) => place <= stop);
    if (last < 0) return [];
    const earlier = at[last] === stop ? "" : ` (${names[axisNow()]} ${number(at[last])})`;
    return [`${curve.name} ${number(curve.y[last])}${earlier}`];
  };
  return {
    svg, range, full, draw,
    legends: new Set(curves.map((c) => c.legend)),
    stops: () => [...new Set(shown().flatMap((c) => c.x[axisNow()]))].sort((a, b) => a - b),
    words: (stop) => [`${names[axisNow()]} ${number(stop)}`, ...shown().flatMap((c) => value(c, stop))].join("\n"),
  };
};

const lines = []; // line charts
const read = [...document.querySelectorAll(".chart")].map((chart) => {
  const data = JSON.parse(chart.querySelector("script").textContent);
  const made = data.texts ? ofTexts(chart, data) : ofCurves(chart, data);
  if (made.draw) lines.push(made);
  return Object.assign(made, { chart, tip: chart.querySelector(".tip") });
});

// Places are computed from the padding of a chart in page.css, since reading them would lay out the page for each chart.
const [LEFT, RIGHT] = [52, 14];
const cursor = ({ svg, range, words, tip }, stop) => {
  const part = range()[1] > range()[0] ? scale(range())(stop) : 0.5;
  const visible = stop !== undefined && part >= 0 && part <= 1;
  const line = svg.querySelector(".cursor");
  line.style.visibility = tip.style.visibility = visible ? "visible" : "hidden";
  if (!visible) return;
  for (const end of ["x1", "x2"]) line.setAttribute(end, `${100 * part}%`);
  tip.textContent = words(stop);
  const away = (share, padding) => `calc(${padding + 8}px + ${share} * (100% - ${LEFT + RIGHT}px))`;
  tip.style.left = part > 0.5 ? "auto" : away(part, LEFT);
  tip.style.right = part > 0.5 ? away(1 - part, RIGHT) : "auto";
};
const hide = () => {
  for (const { chart, tip } of read) {
    for (const line of chart.querySelectorAll(".cursor")) line.style.visibility = "hidden";
    tip.style.visibility = "hidden";
  }
};

const unzoom = document.createElement("button");
const redraw = () => {
  hide();
  for (const { draw } of lines) draw();
  unzoom.hidden = !zoomed[axisNow()];
};
const zoom = (range) => {
  const unit = range && 10 ** Math.floor(Math.log10((range[1] - range[0]) / 100));
  zoomed[axisNow()] = range?.map((end) => Math.round(end / unit) * unit);
  redraw();
};
unzoom.type = "button";
unzoom.textContent = "reset zoom";
unzoom.hidden = true;
unzoom.addEventListener("click", () => zoom());
const controls = document.querySelector(".views");
controls?.append(unzoom);
redraw();
controls?.addEventListener("change", redraw);
controls?.addEventListener("submit", (event) => event.preventDefault());

for (const made of read) {
  const { chart, svg, range, full, stops, draw } = made;
  const shared = draw ? lines : [made];
  let at, dragged; // the stop of the cursor; of a drag, where it began, and its rectangle

  const show = (stop) => {
    at = stop;
    for (const other of shared) {
      other.tip.setAttribute("aria-live", other === made ? "polite" : "off");
      cursor(other, stop);
    }
  };
  const partOf = (event) => {
    const box = svg.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
  };
  const widen = (from, to) => {
    const [first, last] = full();
    if (from <= first && last <= to) zoom();
    else zoom([Math.max(first, from), Math.min(last, to)]);
  };
  const placeOf = (part) => range()[0] + part * (range()[1] - range()[0]);
  const inRange = () => stops().filter((stop) => range()[0] <= stop && stop <= range()[1]);

  chart.addEventListener("pointermove", (event) => {
    const part = partOf(event);
    if (dragged) {
      dragged.box.setAttribute("x", `${100 * Math.min(part, dragged.from)}%`);
      dragged.box.setAttribute("width", `${100 * Math.abs(part - dragged.from)}%`);
    }
    const away = (stop) => Math.abs(stop - placeOf(part));
    const found = inRange();
    if (found.length) show(found.reduce((nearest, stop) => (away(stop) < away(nearest) ? stop : nearest)));
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("focus", () => {
    if (chart.matches(":focus-visible")) show(inRange().find((stop) => stop >= at) ?? inRange()[0]);
  });
  chart.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const found = inRange();
    const move = { ArrowLeft: -1, ArrowRight: 1, PageDown: 20, PageUp: -20, Home: -found.length, End: found.length }[event.key];
    const [from, to] = range();
    const near = found.includes(at) ? at : placeOf(0.5);
    if (move && found.length) show(found[Math.max(0, Math.min(found.length - 1, found.indexOf(at) + move))]);
    else if (draw && event.key === "+" && to > from) zoom([near - (near - from) / 2, near + (to - near) / 2]);
    else if (draw && event.key === "-" && zoomed[axisNow()]) widen(from - (to - from) / 2, to + (to - from) / 2);
    else if (draw && event.key === "Escape" && zoomed[axisNow()]) zoom();
    else return;
    event.preventDefault();
  });
  if (!draw) continue;

  // A drag with a mouse or a pen selects a range. On touch screens it scrolls.
  chart.addEventListener("pointerdown", (event) => {
    if (event.button || event.pointerType === "touch") return;
    chart.setPointerCapture(event.pointerId);
    dragged = { from: partOf(event), box: make("rect", { class: "selected", y: 0, height: "100%", width: 0 }) };
    svg.append(dragged.box);
  });
  const end = (event) => {
    if (!dragged) return;
    const [from, to] = [dragged.from, partOf(event)].sort((a, b) => a - b);
    dragged.box.remove();
    dragged = undefined;
    const far = (to - from) * svg.clientWidth > 4 && range()[1] > range()[0];
    if (far && event.type === "pointerup") zoom([placeOf(from), placeOf(to)]);
  };
  chart.addEventListener("pointerup", end);
  chart.addEventListener("pointercancel", end);
  chart.addEventListener("dblclick", () => zoom());

  // Each entry of a legend hides its curves in all charts.
  for (const entry of chart.parentElement.querySelectorAll(".key span:has(.swatch)")) {
    const name = entry.textContent;
    if (!made.legends.has(name)) continue; // a limit, which all curves are compared with
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.legend = name;
    button.setAttribute("aria-pressed", true);
    button.title = `hide or show ${name} in all charts`;
    button.append(...entry.childNodes);
    entry.append(button);
    button.addEventListener("click", () => {
      if (!hidden.delete(name)) hidden.add(name);
      for (const other of document.querySelectorAll(".key button"))
        if (other.dataset.legend === name) other.setAttribute("aria-pressed", !hidden.has(name));
      redraw();
    });
  }
}
