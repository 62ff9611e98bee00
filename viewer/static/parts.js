// Pieces that several pages share.

import { address, el, link } from "./dom.js";
import { number, signed } from "./format.js";

export function rewardChip(reward) {
  return el("span", { class: "chip reward", title: "reward" }, "reward ", el("b", {}, number(reward)));
}

export function advantageChip(advantage) {
  if (advantage === null || advantage === undefined) return null;
  const style = advantage > 0 ? "up" : advantage < 0 ? "down" : "";
  return el("span", { class: `chip ${style}`, title: "advantage: how much better than its group, or than the critic expected" }, "advantage ", el("b", {}, signed(advantage)));
}

export function stateChip(state) {
  const kind = String(state).split(/[:@]/)[0];
  return el("span", { class: `chip state-${["trained", "filtered", "failed"].includes(kind) ? kind : "other"}` }, String(state).replace("@", " at step "));
}

export function bubbles(said) {
  return said.map((message) =>
    el("div", { class: `bubble role-${["user", "assistant", "system", "tool"].includes(message.role) ? message.role : "other"}` },
      el("small", {}, message.role), el("div", { class: "said" }, message.text || "(nothing)")),
  );
}

/** One column per run; `make(run, index)` gives its content. A run that cannot answer says why, in its column. */
export async function columns(runs, make) {
  const made = await Promise.all(runs.map((run, index) => make(run, index).catch((error) => problem(error))));
  if (runs.length === 1) return made[0];
  return el("div", { class: "columns" }, made.map((content, index) => el("section", {}, el("h2", { class: "run-title" }, runTitle(runs[index], index)), content)));
}

export function runTitle(run, index) {
  return [el("i", { class: `key colour-${index === 0 ? 0 : 3}` }), run.name];
}

export function problem(error) {
  return el("p", { class: "problem" }, error.message);
}

export function pager(page, params, total, pageRows) {
  const now = Number(params.page || 0);
  const last = Math.max(0, Math.ceil(total / pageRows) - 1);
  if (last === 0) return null;
  const turn = (to, text) => (to < 0 || to > last ? el("span", { class: "hint" }, text) : link(page, { ...params, page: to }, text));
  return el("nav", { class: "pager" }, turn(now - 1, "← before"), ` page ${number(now + 1)} of ${number(last + 1)} `, turn(now + 1, "next →"));
}

export function go(page, params) {
  window.location.hash = address(page, params);
}

export function envOptions(envs) {
  return { "": "all environments", ...Object.fromEntries(envs.map((env) => [env, env])) };
}

export function stepInput(step, change) {
  return el("label", { class: "control" }, "step", el("input", { type: "number", min: 1, value: step ?? "", "aria-label": "step", change: (event) => change(event.target.value) }));
}

/** A thin bar from 0 to 1. */
export function shareBar(parts) {
  return el("div", { class: "share" }, parts.map(([share, style, title]) => el("i", { class: style, title, style: { width: `${100 * share}%` } })));
}
