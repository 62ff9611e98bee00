// Groups: a list to search, and one group with its rollouts side by side.

import { el, link, select } from "./dom.js";
import { number } from "./format.js";
import { advantageChip, bubbles, columns, envOptions, go, pager, rewardChip, shareBar, stateChip, stepInput } from "./parts.js";
import { MAX_INLINE, tokenView } from "./token_view.js";
import { ask } from "./source.js";

const GROUP_ORDERS = { newest: "newest first", oldest: "oldest first", spread: "largest difference in reward", best: "highest reward", worst: "lowest reward", failed: "most failures" };
const GROUP_STATES = { "": "any fate", trained: "trained", filtered: "filtered", failed: "failed" };

export async function groupsPage(runs, params) {
  const change = (name) => (value) => go("groups", { ...params, [name]: value, page: "" });
  const envs = (await Promise.all(runs.map((run) => ask(run.id, "overview")))).flatMap((overview) => overview.envs);
  const lists = await columns(runs, async (run) => {
    const { groups, total, page_rows: pageRows } = await ask(run.id, "groups", { env: params.env, step: params.step, state: params.state, sort: params.sort, page: params.page });
    return el("section", { class: "card" }, el("p", { class: "hint" }, `${number(total)} groups`), groupTable(run, groups), pager("groups", params, total, pageRows));
  });
  return el(
    "div",
    {},
    el("div", { class: "controls" }, select("environment", envOptions([...new Set(envs)]), params.env ?? "", change("env")), select("fate", GROUP_STATES, params.state ?? "", change("state")), select("order", GROUP_ORDERS, params.sort ?? "newest", change("sort")), stepInput(params.step, change("step"))),
    lists,
  );
}

function groupTable(run, groups) {
  const rows = groups.map((group) =>
    el(
      "tr",
      {},
      el("td", {}, number(group.step)),
      el("td", { class: "name" }, link("group", { run: run.id, id: group.group_id }, group.group_id)),
      el("td", {}, number(group.num_rollouts)),
      el("td", {}, rewardRange(group)),
      el("td", {}, number(group.reward_mean)),
      el("td", {}, group.num_failed ? number(group.num_failed) : ""),
      el("td", {}, stateChip(group.state)),
      el("td", {}, group.num_exported ? `${number(group.num_exported)} with tokens` : ""),
    ),
  );
  const heads = ["step", "group", "rollouts", "lowest to highest", "mean", "failed", "fate", ""];
  return el("table", { class: "list" }, el("thead", {}, el("tr", {}, heads.map((head) => el("th", {}, head)))), el("tbody", {}, rows));
}

function rewardRange({ reward_min: low, reward_max: high }) {
  if (low === null) return "–";
  if (low < 0 || high > 1) return `${number(low)} … ${number(high)}`;
  return shareBar([[low, "fill-none", ""], [Math.max(high - low, 0.02), "fill-range", `${number(low)} to ${number(high)}`]]);
}

export async function groupPage(runs, params) {
  const own = runs.filter((run) => run.id === Number(params.run ?? 0));
  const others = runs.filter((run) => run.id !== Number(params.run ?? 0));
  const both = [...own];
  for (const run of others) {
    // Runs of one config visit the same examples: the same group of the other run stands beside it.
    const found = await ask(run.id, "group", { id: params.id }).catch(() => null);
    if (found) both.push(run);
  }
  return columns(both, (run) => groupCards(run, params.id));
}

async function groupCards(run, id) {
  const { group, prompt, rollouts } = await ask(run.id, "group", { id });
  const cards = await Promise.all(rollouts.map((rollout) => rolloutCard(run, rollout)));
  return el(
    "div",
    {},
    el("h2", {}, id),
    el("p", {}, stateChip(group.state), el("span", { class: "chip" }, `${group.num_rollouts} rollouts`), el("span", { class: "chip" }, "mean reward ", el("b", {}, number(group.reward_mean))), group.num_failed ? el("span", { class: "chip state-failed" }, `${group.num_failed} failed`) : null),
    bubbles(prompt),
    el("div", { class: "cards" }, cards),
  );
}

async function rolloutCard(run, rollout) {
  const kind = rollout.failure ? "failure" : rollout.advantage > 0 ? "good" : rollout.advantage < 0 ? "bad" : "";
  const sequence = rollout.sequences.length && rollout.num_tokens <= MAX_INLINE ? await ask(run.id, "sequence", { id: rollout.sequences[0] }).catch(() => null) : null;
  const said = rollout.failure ? el("p", { class: "problem" }, rollout.message || rollout.failure) : sequence ? tokenView(sequence, { prompt: false, tools: false }) : bubbles(rollout.answer);
  return el(
    "article",
    { class: `rollout ${kind}` },
    el("p", {}, rollout.failure ? stateChip(`failed: ${rollout.failure}`) : [rewardChip(rollout.reward), advantageChip(rollout.advantage)]),
    said,
    el("p", { class: "hint" }, link("rollout", { run: run.id, id: rollout.id }, "open"), sequence ? " · coloured by push" : ""),
  );
}
