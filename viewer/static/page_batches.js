// Batches over time: what was generated for each, what of it was trained, and what the trainer reported.

import { el, link } from "./dom.js";
import { number } from "./format.js";
import { columns, pager, shareBar } from "./parts.js";
import { ask } from "./source.js";

const HEADS = ["step", "rollouts", "", "trained", "filtered", "failed", "reward", "oldest policy", "loss", "gradient", "tokens/s", "seconds"];

export async function batchesPage(runs, params) {
  return columns(runs, async (run) => {
    const { batches, total, page_rows: pageRows } = await ask(run.id, "batches", { page: params.page });
    const most = Math.max(1, ...batches.map((batch) => batch.num_rollouts));
    return el(
      "section",
      { class: "card" },
      el("p", { class: "hint" }, "One row per batch, newest first. The bar is as long as the batch had rollouts: trained, filtered (no difference to learn from), failed."),
      el("table", { class: "list" }, el("thead", {}, el("tr", {}, HEADS.map((head) => el("th", {}, head)))), el("tbody", {}, batches.map((batch) => batchRow(run, batch, most)))),
      pager("batches", params, total, pageRows),
    );
  });
}

function batchRow(run, batch, most) {
  const parts = ["trained", "filtered", "failed"].map((kind) => [batch[`num_${kind}`] / most, `fill-${kind}`, `${kind} ${batch[`num_${kind}`]}`]);
  const trainer = batch.trainer;
  const cells = [
    number(batch.num_rollouts), shareBar(parts), number(batch.num_trained), number(batch.num_filtered), number(batch.num_failed), number(batch.reward_mean),
    batch.oldest_version === null ? "–" : `v${batch.oldest_version}`, number(trainer.loss), number(trainer.grad_norm), number(Math.round(trainer.tokens_per_s ?? NaN)), number(trainer["time/step_s"], 2),
  ];
  return el("tr", {}, el("td", {}, link("groups", { run: run.id, step: batch.step }, number(batch.step))), cells.map((cell) => el("td", {}, cell)));
}
