// One rollout: what was said, every token of it, and the packed row it was trained in.

import { el, facts, link, svg } from "./dom.js";
import { number } from "./format.js";
import { advantageChip, bubbles, problem, rewardChip, stateChip } from "./parts.js";
import { tokenView } from "./token_view.js";
import { ask } from "./source.js";
import { hideTip, showTip } from "./tip.js";

export async function rolloutPage(runs, params) {
  const run = runs.find((one) => one.id === Number(params.run ?? 0)) ?? runs[0];
  const rollout = await ask(run.id, "rollout", { id: params.id });
  const sequences = await Promise.all(rollout.sequences.map((id) => showTokens(run, id).catch(problem)));
  return el(
    "div",
    {},
    el("h2", {}, rollout.trajectory_id),
    el("p", {}, rollout.failure ? null : [rewardChip(rollout.reward), advantageChip(rollout.advantage)], stateChip(rollout.state), link("group", { run: run.id, id: rollout.group_id }, "its group")),
    rollout.failure ? el("p", { class: "problem" }, `${rollout.failure}: ${rollout.message ?? ""}`) : null,
    sequences.length || rollout.failure ? sequences : el("p", { class: "hint" }, "The tokens of this rollout were not exported."),
    el("div", { class: "pair wide-left" }, el("section", { class: "card" }, el("h3", {}, "Conversation"), bubbles([...rollout.prompt, ...rollout.answer])), el("section", { class: "card" }, el("h3", {}, "Facts"), rolloutFacts(rollout))),
  );
}

function rolloutFacts(rollout) {
  const versions = rollout.oldest_version === null || rollout.oldest_version === undefined ? null : rollout.oldest_version === rollout.newest_version ? `v${rollout.oldest_version}` : `v${rollout.oldest_version} to v${rollout.newest_version}`;
  const columns = rollout.state_columns ?? {};
  return facts([
    ["environment", rollout.env_name],
    ["example", rollout.example_id],
    ["batch", rollout.step],
    ["policy versions", versions],
    ["tokens", rollout.num_tokens],
    ["of them sampled", rollout.num_sampled_tokens],
    ["branches", rollout.num_branches],
    ["cut at the limit", rollout.is_truncated ? "yes" : null],
    ["temperature", rollout.temperature],
    ["seconds", rollout.duration_s === undefined ? null : number(rollout.duration_s, 2)],
    ...Object.entries(rollout.metrics ?? {}).map(([name, value]) => [name, number(value)]),
    ...Object.entries(columns).map(([name, value]) => [name, JSON.stringify(value)]),
  ]);
}

async function showTokens(run, id) {
  const sequence = await ask(run.id, "sequence", { id });
  const row = await ask(run.id, "packed_row", { id: `${sequence.step}.${sequence.rank}.${sequence.micro_batch}` }).catch(() => null);
  return el("section", { class: "card" }, el("h3", {}, "Token by token"), tokenView(sequence), row ? packedRow(run, sequence, row.sequences) : null);
}

function packedRow(run, sequence, others) {
  const total = sequence.micro_batch_tokens;
  if (!total) return null;
  const x = (position) => (1000 * position) / total;
  const segments = others.map((one) => {
    const own = one.id === sequence.id;
    const tell = (event) => showTip(event, el("div", {}, one.trajectory_id), el("div", { class: "hint" }, `positions ${one.position} to ${one.position + one.num_tokens - 1}`));
    const open = () => { if (!own) window.location.hash = `#/sequence?run=${run.id}&id=${one.id}`; };
    return svg("rect", { class: own ? "segment own" : "segment", x: x(one.position), width: Math.max(1, x(one.num_tokens) - 1), y: 0, height: 22, mousemove: tell, mouseleave: hideTip, click: open });
  });
  return el(
    "div",
    { class: "packed" },
    el("h3", {}, "The packed row it was trained in"),
    el("p", {}, `Step ${sequence.step}, rank ${sequence.rank}, micro batch ${sequence.micro_batch}, positions ${sequence.position} to ${sequence.position + sequence.token_ids.length - 1} of ${number(total)}.`),
    svg("svg", { viewBox: "0 0 1000 22", class: "packed-row", preserveAspectRatio: "none" }, svg("rect", { class: "row", x: 0, y: 0, width: 1000, height: 22 }), segments),
    el("p", { class: "hint" }, "Other blocks: sequences of the same forward pass that were exported, too. Click one to see it. Attention never crosses from one to another."),
  );
}

/** A sequence that was found without its rollout: opens the rollout if it is saved. */
export async function sequencePage(runs, params) {
  const run = runs.find((one) => one.id === Number(params.run ?? 0)) ?? runs[0];
  const sequence = await ask(run.id, "sequence", { id: params.id });
  if (sequence.rollout) {
    const page = await rolloutPage(runs, { run: run.id, id: sequence.rollout }).catch(() => null);
    if (page) return page;
  }
  return el("div", {}, el("h2", {}, sequence.trajectory_id), await showTokens(run, params.id));
}
