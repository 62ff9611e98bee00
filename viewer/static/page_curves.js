// All curves; two runs share each chart.

import { el, select } from "./dom.js";
import { lineChart } from "./chart.js";
import { go, problem, runTitle } from "./parts.js";
import { ask, embedded } from "./source.js";

export async function curvesPage(runs, params) {
  const answers = await Promise.all(runs.map((run) => ask(run.id, "curves").catch((error) => ({ charts: [], error }))));
  const ids = [...new Set(answers.flatMap((answer) => answer.charts.map((chart) => chart.id)))];
  const problems = answers.filter((answer) => answer.error).map((answer) => problem(answer.error));
  if (ids.length === 0) problems.push(el("p", { class: "hint" }, "No metrics yet: they come with the first step."));
  const titles = runs.length > 1 ? el("p", { class: "legend" }, runs.map((run, index) => el("span", {}, runTitle(run, index)))) : null;
  const cards = ids.map((id) => curveCard(id, runs, answers));
  // A report holds the curves above only.
  if (!embedded && ids.length > 0) cards.push(await anyMetric(runs, params.metric ?? ""));
  return el("div", {}, problems, titles, el("div", { class: "charts" }, cards));
}

/** Whatever else was measured: a card with a choice of all metrics. */
async function anyMetric(runs, chosen) {
  const found = await Promise.all(runs.map((run) => ask(run.id, "metric", { id: chosen })));
  const names = [...new Set(found.flatMap((answer) => answer.names))];
  const options = { "": "choose a metric", ...Object.fromEntries(names.map((name) => [name, name])) };
  const series = found.map(({ series: one }, run) => (runs.length === 1 ? one : { ...one, label: runs[run].name, colour: run * 3, dashed: run > 0 }));
  const chart = chosen ? lineChart(series, { label: chosen }) : el("p", { class: "hint" }, `${names.length} metrics were recorded.`);
  return el("section", { class: "card", "data-chart": "any" }, el("h3", {}, "Any metric"), el("p", {}, select("metric", options, chosen, (metric) => go("curves", { metric }))), chart);
}

function curveCard(id, runs, answers) {
  const found = answers.map((answer) => answer.charts.find((chart) => chart.id === id));
  const { title, hint } = found.find(Boolean);
  const series = found.flatMap((chart, run) => (chart ? chart.series.map((one, index) => named(one, index, run, runs, chart)) : []));
  return el("section", { class: "card", "data-chart": id }, el("h3", {}, title), el("p", { class: "hint" }, hint), lineChart(series, { label: title }));
}

function named(one, index, run, runs, chart) {
  if (runs.length === 1) return one;
  const label = chart.series.length > 1 ? `${runs[run].name}: ${one.label}` : runs[run].name;
  return { ...one, label, colour: run * 3 + index, dashed: run > 0 };
}
