// The first page: why the reward moved, shown with one group.

import { el, link } from "./dom.js";
import { number, plural } from "./format.js";
import { lineChart } from "./chart.js";
import { advantageChip, bubbles, columns, rewardChip, shareBar } from "./parts.js";
import { pushedTokens, tokenView } from "./token_view.js";
import { ask } from "./source.js";

const MAX_BOXES = 48;

export async function startPage(runs) {
  return columns(runs, async (run) => {
    const [story, overview, curves] = await Promise.all([ask(run.id, "story"), ask(run.id, "overview"), ask(run.id, "curves")]);
    const lesson = story.group ? await showLesson(run, story) : el("p", { class: "hint" }, "No group with different rewards is saved yet, so there is nothing to learn from.");
    return el("div", {}, headline(story, overview, curves, runs.length), lesson);
  });
}

function headline(story, overview, curves, numRuns) {
  const reward = curves.charts.find((chart) => chart.id === "reward");
  const wide = numRuns === 1;
  return el(
    "section",
    { class: "card headline" },
    el("div", { class: "words" }, el("h1", {}, sentence(story)), el("p", {}, totals(overview)), fates(overview)),
    reward ? lineChart(reward.series, { label: "reward over steps", height: wide ? 170 : 190, width: wide ? 620 : 460 }) : null,
  );
}

function sentence({ rewards, last_step: steps }) {
  if (!rewards) return "No reward was recorded yet.";
  const change = rewards.last - rewards.first;
  const verb = Math.abs(change) < 0.02 ? "stayed" : change > 0 ? "rose" : "fell";
  const numbers = verb === "stayed" ? [el("b", {}, number(rewards.last))] : [el("b", {}, number(rewards.first)), " to ", el("b", {}, number(rewards.last))];
  return ["The reward ", verb, verb === "stayed" ? " at " : " from ", ...numbers, ` in ${plural(steps, "step")}.`];
}

function totals({ counts, envs }) {
  return `${plural(counts.rollouts, "rollout")} in ${plural(counts.groups, "group")}, ${plural(envs.length, "environment")}: ${envs.join(", ")}`;
}

function fates({ fates: found }) {
  const total = Object.values(found).reduce((sum, count) => sum + count, 0);
  if (total === 0) return null;
  const kinds = { trained: 0, filtered: 0, failed: 0, other: 0 };
  for (const [fate, count] of Object.entries(found)) {
    const kind = fate.split(":")[0];
    kinds[kind in kinds ? kind : "other"] += count;
  }
  const shown = Object.entries(kinds).filter(([, count]) => count > 0);
  return el(
    "div",
    {},
    shareBar(shown.map(([kind, count]) => [count / total, `fill-${kind}`, `${kind}: ${number(count)}`])),
    el("p", { class: "hint legend" }, shown.map(([kind, count]) => el("span", {}, el("i", { class: `key fill-${kind}` }), `${kind} ${number(count)}`))),
  );
}

async function showLesson(run, story) {
  const { group, prompt, rollouts, visits } = await ask(run.id, "group", { id: story.group.group_id });
  const pick = (id) => rollouts.find((rollout) => rollout.id === id);
  const cards = await Promise.all(
    [[pick(story.good), "good"], [pick(story.bad), "bad"]].filter(([rollout]) => rollout).map(([rollout, kind]) => lessonCard(run, rollout, kind)),
  );
  return el(
    "section",
    { class: "card lesson" },
    el("h2", {}, `Why: one lesson of step ${group.step}`),
    el("p", {}, `The same task was tried ${group.num_rollouts} times. What did better than expected (than its group, or than a critic had thought) has a positive advantage, and its tokens are made more likely; what did worse, less likely.`),
    bubbles(prompt),
    el("div", { class: "tries" }, rollouts.map((rollout) => tryChip(run, rollout))),
    el("div", { class: "pair" }, cards),
    cards.some((card) => card.querySelector(".token")) && el("p", { class: "hint" }, "Number below a token: its push, advantage × ratio × (1 − p). Near 0: the policy was already sure of it. Point at a token for all its numbers."),
    visits.length > 1 ? later(run, visits) : null,
    el("p", {}, link("group", { run: run.id, id: group.group_id }, "All rollouts of this group"), " · ", link("groups", { run: run.id, sort: "spread" }, "more groups like it")),
  );
}

function tryChip(run, rollout) {
  const style = rollout.advantage > 0 ? "up" : rollout.advantage < 0 ? "down" : "";
  const title = rollout.failure ? `failed: ${rollout.failure}` : `reward ${number(rollout.reward)}`;
  const text = rollout.failure ? "failed" : rollout.answer.map((message) => message.text).join(" ").slice(0, 24) || "(nothing)";
  return link("rollout", { run: run.id, id: rollout.id }, el("span", { class: `try ${style}`, title }, text, el("small", {}, rollout.failure ? "" : number(rollout.reward))));
}

async function lessonCard(run, rollout, kind) {
  const head = kind === "good" ? "A good one: made more likely" : "A bad one: made less likely";
  const sequence = rollout.sequences.length ? await ask(run.id, "sequence", { id: rollout.sequences[0] }) : null;
  const isShort = sequence && sequence.loss_mask.filter(Boolean).length <= MAX_BOXES;
  const text = sequence ? (isShort ? pushedTokens(sequence) : tokenView(sequence, { prompt: false, tools: false })) : bubbles(rollout.answer);
  return el(
    "article",
    { class: `rollout ${kind}` },
    el("h3", {}, head),
    el("p", {}, rewardChip(rollout.reward), advantageChip(rollout.advantage)),
    text,
    sequence ? null : el("p", { class: "hint" }, "Single tokens are not recorded: add an empty table [trainer.token_export] to the config."),
    el("p", {}, link("rollout", { run: run.id, id: rollout.id }, sequence ? "the whole rollout, token by token" : "the whole rollout")),
  );
}

function later(run, visits) {
  const rows = visits.map((visit) =>
    el("tr", {}, el("td", {}, link("group", { run: run.id, id: visit.group_id }, `step ${visit.step}`)), el("td", {}, shareBar([[Math.max(0, Math.min(1, visit.reward_mean ?? 0)), "fill-trained", ""]])), el("td", {}, number(visit.reward_mean))),
  );
  return el("div", {}, el("h3", {}, "The same task over the run"), el("table", { class: "visits" }, rows));
}
