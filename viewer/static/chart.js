// Line charts as SVG: axes, one path per series, and a crosshair that reads all series at a step.

import { el, svg } from "./dom.js";
import { number } from "./format.js";
import { hideTip, showTip } from "./tip.js";

const WIDTH = 460;
const LEFT = 46;
const BOTTOM = 22;
const TOP = 8;
const RIGHT = 10;
const COLOURS = 6;

/** series: [{label, steps, values, colour, dashed}] */
export function lineChart(series, { height = 190, label = "", width = WIDTH } = {}) {
  const lines = series.filter((one) => one.steps.length > 0);
  if (lines.length === 0) return el("p", { class: "hint" }, "no numbers yet");
  const scale = makeScale(lines, width, height);
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  const graph = svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": label },
    axes(scale, width, height),
    lines.map((one, index) => path(one, index, scale)),
    cursor,
  );
  graph.addEventListener("mousemove", (event) => readAt(event, graph, lines, scale, cursor, width));
  graph.addEventListener("mouseleave", () => {
    cursor.setAttribute("visibility", "hidden");
    hideTip();
  });
  return el("figure", { class: "curve" }, graph, lines.length > 1 ? legend(lines) : null);
}

function makeScale(lines, width, height) {
  const steps = lines.flatMap((one) => [one.steps[0], one.steps.at(-1)]);
  const values = lines.flatMap((one) => one.values);
  const [firstStep, lastStep] = [Math.min(...steps), Math.max(...steps)];
  let low = Math.min(...values);
  let high = Math.max(...values);
  const margin = (high - low || Math.abs(high) || 1) * 0.08;
  low = low >= 0 && low - margin < 0 ? 0 : low - margin;
  high += margin;
  const x = (step) => LEFT + ((step - firstStep) / (lastStep - firstStep || 1)) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - ((value - low) / (high - low)) * (height - BOTTOM - TOP);
  return { x, y, firstStep, lastStep, low, high };
}

function axes(scale, width, height) {
  const ys = ticks(scale.low, scale.high, 4).map((value) => [
    svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: scale.y(value), y2: scale.y(value) }),
    svg("text", { class: "tick", x: LEFT - 6, y: scale.y(value) + 3.5, "text-anchor": "end" }, tickText(value)),
  ]);
  const xs = ticks(scale.firstStep, scale.lastStep, 6)
    .filter(Number.isInteger)
    .map((step) => svg("text", { class: "tick", x: scale.x(step), y: height - 6, "text-anchor": "middle" }, step));
  return [...ys, ...xs];
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

function tickText(value) {
  const size = Math.abs(value);
  if (size >= 1000) return `${Number((value / 1000).toPrecision(3))}k`;
  return size !== 0 && size < 0.001 ? value.toExponential(0) : Number(value.toPrecision(3));
}

function path(one, index, scale) {
  const points = one.steps.map((step, place) => `${scale.x(step).toFixed(1)},${scale.y(one.values[place]).toFixed(1)}`);
  const style = `series colour-${(one.colour ?? index) % COLOURS}${one.dashed ? " dashed" : ""}`;
  if (points.length === 1) {
    const [x, y] = points[0].split(",");
    return svg("circle", { class: `${style} dot`, cx: x, cy: y, r: 3 });
  }
  return svg("path", { class: style, d: `M${points.join("L")}` });
}

function legend(lines) {
  const entries = lines.map((one, index) => {
    const style = `key colour-${(one.colour ?? index) % COLOURS}${one.dashed ? " dashed" : ""}`;
    return el("span", {}, el("i", { class: style }), one.label);
  });
  return el("figcaption", { class: "legend" }, entries);
}

function readAt(event, graph, lines, scale, cursor, width) {
  const box = graph.getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * width;
  const share = (x - LEFT) / (width - LEFT - RIGHT);
  const step = scale.firstStep + share * (scale.lastStep - scale.firstStep);
  const nearest = lines.map((one) => closest(one.steps, step));
  const shown = lines[0].steps[nearest[0]];
  cursor.setAttribute("x1", scale.x(shown));
  cursor.setAttribute("x2", scale.x(shown));
  cursor.setAttribute("visibility", "visible");
  const rows = lines.map((one, index) => el("div", {}, `${one.label}: `, el("b", {}, number(one.values[nearest[index]]))));
  showTip(event, el("div", { class: "hint" }, `step ${number(shown)}`), rows);
}

function closest(steps, wanted) {
  let best = 0;
  steps.forEach((step, place) => {
    if (Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = place;
  });
  return best;
}
