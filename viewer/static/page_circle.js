// The circle of services: who lives, what flows between them, and who waits for whom right now.

import { el, facts, svg } from "./dom.js";
import { number } from "./format.js";
import { columns } from "./parts.js";
import { ask } from "./source.js";

const PLACES = { orchestrator: [300, 70], trainer: [500, 290], inference: [100, 290] };
const FLOWS = [
  ["orchestrator", "trainer", "batches", [462, 172]],
  ["trainer", "inference", "weights", [300, 326]],
  ["inference", "orchestrator", "tokens", [138, 172]],
];
const HALF = [88, 40];

export async function circlePage(runs) {
  return columns(runs, async (run) => {
    const circle = await ask(run.id, "circle");
    return el(
      "section",
      { class: "card" },
      el("p", { class: circle.culprit ? "problem" : "" }, circle.conclusion),
      circleDiagram(circle),
      el("h3", {}, "Who waits for whom"),
      circle.waits.length ? el("ul", {}, circle.waits.map(waitLine)) : el("p", { class: "hint" }, circle.is_live ? "Nobody waits." : "The run has ended: nobody waits."),
      el("div", { class: "service-cards" }, circle.services.map(serviceFacts)),
      el("h3", {}, "Positions"),
      facts(Object.entries(circle.positions)),
    );
  });
}

function circleDiagram(circle) {
  const conditions = Object.fromEntries(circle.services.map((service) => [service.name, service.condition]));
  const marker = (id, style) =>
    svg("marker", { id, viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" }, svg("path", { class: style, d: "M0,0L10,5L0,10z" }));
  return svg(
    "svg",
    { viewBox: "0 0 600 350", class: "circle", role: "img", "aria-label": "services and what flows between them" },
    svg("defs", {}, marker("flow-head", "flow-head"), marker("wait-head", "wait-head")),
    FLOWS.map(([from, to, what, at]) => [arrow(from, to, "flow", 0), svg("text", { class: "flow-text", x: at[0], y: at[1], "text-anchor": "middle" }, what)]),
    circle.waits.flatMap((wait) => wait.peers.filter((peer) => peer in PLACES && wait.waiter in PLACES).map((peer) => arrow(wait.waiter, peer, "wait", 16))),
    Object.keys(PLACES).map((name) => node(name, conditions[name] ?? "not started", circle)),
  );
}

function arrow(from, to, style, shift) {
  const [start, end] = [PLACES[from], PLACES[to]];
  const length = Math.hypot(end[0] - start[0], end[1] - start[1]);
  const [dx, dy] = [(end[0] - start[0]) / length, (end[1] - start[1]) / length];
  const gap = (place) => Math.min(HALF[0] / Math.abs(dx || 1e-9), HALF[1] / Math.abs(dy || 1e-9)) + place;
  const [ox, oy] = [-dy * shift, dx * shift];
  const at = (point, along) => [point[0] + dx * along + ox, point[1] + dy * along + oy];
  const [x1, y1] = at(start, gap(4 + shift));
  const [x2, y2] = at(end, -gap(6 + shift));
  return svg("line", { class: style, x1, y1, x2, y2, "marker-end": `url(#${style}-head)` });
}

function node(name, condition, circle) {
  const [x, y] = PLACES[name];
  const service = circle.services.find((one) => one.name === name);
  const version = service?.facts.version;
  return svg(
    "g",
    { class: `service condition-${String(condition).replace(" ", "-")}` },
    svg("rect", { x: x - HALF[0], y: y - HALF[1], width: 2 * HALF[0], height: 2 * HALF[1], rx: 12 }),
    svg("text", { x, y: y - 8, "text-anchor": "middle", class: "service-name" }, name),
    svg("text", { x, y: y + 12, "text-anchor": "middle", class: "service-condition" }, condition),
    version === undefined ? null : svg("text", { x, y: y + 29, "text-anchor": "middle", class: "service-note" }, `version ${version}`),
  );
}

function waitLine(wait) {
  return el("li", {}, el("b", {}, wait.waiter), ` waits for ${wait.what}`, wait.peers.length ? el("span", { class: "hint" }, ` → ${wait.peers.join(", ")}`) : null);
}

function serviceFacts(service) {
  const age = service.progress_age_s;
  const rows = [["condition", service.condition], ["last progress", typeof age === "number" ? `${number(age, 1)} s ago` : null], ["ended", service.ended], ...Object.entries(service.facts).map(([key, value]) => [key.replaceAll("_", " "), typeof value === "number" ? number(value) : String(value)])];
  return el("article", {}, el("h3", {}, service.name), facts(rows));
}
