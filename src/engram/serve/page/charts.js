// Small charts as SVG.

import { h, svg } from "./dom.js";

const WIDE = 600;
const HIGH = 150;

/** The loss over a lesson. points: [share done, loss], in order. */
export function lossCurve() {
  const area = svg("path", { class: "curve-area" });
  const line = svg("path", { class: "curve", "vector-effect": "non-scaling-stroke" });
  const grid = [0.25, 0.5, 0.75].map((share) => svg("line", { x1: 0, x2: WIDE, y1: HIGH * share, y2: HIGH * share, class: "grid-line", "vector-effect": "non-scaling-stroke" }));
  const drawing = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", class: "loss", "aria-hidden": "true", focusable: "false" }, grid, area, line);
  const top = h("span", {}, "");
  const low = h("span", {}, "");
  const figure = h("figure", { class: "chart loss-chart" },
    h("figcaption", { class: "label" }, "Loss"),
    h("div", { class: "loss-box" }, h("div", { class: "loss-scale tiny" }, top, low), drawing));

  function draw(points) {
    const known = points.filter(([, loss]) => Number.isFinite(loss));
    figure.hidden = known.length < 2;
    if (known.length < 2) return;
    const values = known.map(([, loss]) => loss).sort((a, b) => a - b);
    const most = values[Math.floor(0.99 * (values.length - 1))] || values.at(-1); // one high step does not flatten the rest
    const least = Math.min(0, values[0]);
    const height = Math.max(1e-9, most - least);
    const at = ([done, loss]) => `${(done * WIDE).toFixed(1)} ${(HIGH * (1 - Math.min(1.02, (loss - least) / height) * 0.94)).toFixed(1)}`;
    const way = `M${known.map(at).join("L")}`;
    line.setAttribute("d", way);
    area.setAttribute("d", `${way}L${(known.at(-1)[0] * WIDE).toFixed(1)} ${HIGH}L${(known[0][0] * WIDE).toFixed(1)} ${HIGH}Z`);
    top.textContent = most.toPrecision(3);
    low.textContent = least === 0 ? "0" : least.toPrecision(3);
  }
  figure.hidden = true;
  return { element: figure, draw };
}

/** Accuracy over lessons. series: [{name, kind, values: [percent or null]}]; labels: one per lesson. */
export function lessonChart(series, labels) {
  const left = 42;
  const right = 14;
  const top = 12;
  const bottom = 30;
  const wide = window.innerWidth < 752 ? 340 : 640; // the text keeps its size on a phone
  const high = wide === 340 ? 190 : 240;
  const across = wide - left - right;
  const x = (place) => left + (labels.length < 2 ? across / 2 : (across * place) / (labels.length - 1));
  const all = series.flatMap((each) => each.values).filter((value) => typeof value === "number");
  const floor = all.length ? Math.min(80, Math.floor(Math.min(...all) / 20) * 20) : 0;
  const y = (value) => top + (high - top - bottom) * (1 - (value - floor) / (100 - floor));
  const ticks = [];
  for (let value = floor; value <= 100; value += floor >= 60 ? 10 : 20) ticks.push(value);
  const step = Math.max(1, Math.ceil(labels.length / 12));
  const said = series.map((each) => `${each.name}: ${each.values.map((value, place) => (typeof value === "number" ? `${value.toFixed(1)} % after lesson ${labels[place]}` : null)).filter(Boolean).join(", ")}`).join(". ");
  const drawing = svg("svg", { viewBox: `0 0 ${wide} ${high}`, class: "lessons", role: "img", "aria-label": `Accuracy after each lesson. ${said}` },
    ticks.map((value) => [svg("line", { x1: left, x2: wide - right, y1: y(value), y2: y(value), class: "grid-line" }),
      svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, `${value}`)]),
    labels.map((label, place) => place % step === 0 && svg("text", { x: x(place), y: high - 8, "text-anchor": "middle" }, String(label))),
    series.map((each) => {
      const points = each.values.map((value, place) => [value, place]).filter(([value]) => typeof value === "number");
      return svg("g", { class: `series ${each.kind}` },
        points.length > 1 && each.kind !== "new" && svg("path", { d: `M${points.map(([value, place]) => `${x(place).toFixed(1)} ${y(value).toFixed(1)}`).join("L")}` }),
        points.map(([value, place]) => (each.kind === "old"
          ? svg("circle", { cx: x(place), cy: y(value), r: 4.5 })
          : svg("rect", { x: x(place) - 4.5, y: y(value) - 4.5, width: 9, height: 9, transform: each.kind === "new" ? `rotate(45 ${x(place)} ${y(value)})` : null }))));
    }));
  return h("figure", { class: "chart" }, drawing,
    h("figcaption", { class: "legend" }, series.map((each) => h("span", { class: `key ${each.kind}` }, each.name)), h("span", { class: "hint" }, "percent of held-out images, by lesson")));
}
