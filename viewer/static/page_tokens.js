// Exported sequences: a list to search by what is unusual about them, with their tokens in place.

import { checkbox, el, link, select } from "./dom.js";
import { MEASURES } from "./colours.js";
import { number } from "./format.js";
import { advantageChip, columns, envOptions, go, pager, rewardChip, stepInput } from "./parts.js";
import { MAX_INLINE, tokenView } from "./token_view.js";
import { ask } from "./source.js";

const SEQUENCE_ORDERS = { newest: "newest first", ratio: "largest ratio", low_ratio: "smallest ratio", kl: "largest mismatch KL", entropy: "largest entropy", masked: "most masked tokens", advantage: "largest advantage", low_advantage: "smallest advantage" };

export async function tokensPage(runs, params) {
  const change = (name) => (value) => go("tokens", { ...params, [name]: value, page: "" });
  const envs = (await Promise.all(runs.map((run) => ask(run.id, "overview")))).flatMap((overview) => overview.envs);
  const names = Object.fromEntries(Object.entries(MEASURES).map(([key, one]) => [key, one.name]));
  const measure = params.colour in MEASURES ? params.colour : "push";
  const lists = await columns(runs, async (run) => {
    const { sequences, total, page_rows: pageRows } = await ask(run.id, "sequences", { env: params.env, step: params.step, masked: params.masked, sort: params.sort, page: params.page });
    if (total === 0) return el("p", { class: "hint" }, "No sequence was exported that fits. An empty table [trainer.token_export] in the config turns the export on.");
    const rows = await Promise.all(sequences.map((one) => sequenceRow(run, one, measure)));
    return el("section", { class: "card" }, el("p", { class: "hint" }, `${number(total)} sequences`), rows, pager("tokens", params, total, pageRows));
  });
  return el(
    "div",
    {},
    el(
      "div",
      { class: "controls" },
      select("environment", envOptions([...new Set(envs)]), params.env ?? "", change("env")),
      select("order", SEQUENCE_ORDERS, params.sort ?? "newest", change("sort")),
      select("colour by", names, measure, change("colour")),
      checkbox("with masked tokens", params.masked === "1", (on) => change("masked")(on ? "1" : "")),
      stepInput(params.step, change("step")),
    ),
    el("p", { class: "hint" }, MEASURES[measure].hint),
    lists,
  );
}

async function sequenceRow(run, row, measure) {
  const isShort = row.num_tokens <= MAX_INLINE;
  const sequence = isShort ? await ask(run.id, "sequence", { id: row.id }).catch(() => null) : null;
  return el(
    "article",
    { class: "sequence" },
    el(
      "p",
      {},
      el("span", { class: "chip" }, `step ${row.step}`),
      rewardChip(row.reward),
      advantageChip(row.advantage),
      el("span", { class: "chip" }, `ratio ${number(row.min_ratio, 2)} … ${number(row.max_ratio, 2)}`),
      row.num_masked ? el("span", { class: "chip state-filtered" }, `${row.num_masked} masked`) : null,
      link("sequence", { run: run.id, id: row.id }, row.trajectory_id),
    ),
    sequence ? tokenView(sequence, { measure, prompt: false, tools: false }) : el("p", { class: "hint" }, isShort ? "Its tokens are not part of this report." : `${number(row.num_tokens)} tokens: open it to see them.`),
  );
}
