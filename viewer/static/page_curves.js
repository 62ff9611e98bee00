// All curves; two runs share each picture.

import { el } from "./dom.js";
import { lineChart } from "./chart.js";
import { problem, runTitle } from "./parts.js";
import { ask } from "./source.js";

export async function curvesPage(runs) {
  const answers = await Promise.all(runs.map((run) => ask(run.id, "curves").catch((error) => ({ charts: [], error }))));
  const ids = [...new Set(answers.flatMap((answer) => answer.charts.map((chart) => chart.id)))];
  const problems = answers.filter((answer) => answer.error).map((answer) => problem(answer.error));
  if (ids.length === 0) problems.push(el("p", { class: "hint" }, "No metrics yet: they come with the first step."));
  const titles = runs.length > 1 ? el("p", { class: "legend" }, runs.map((run, index) => el("span", {}, runTitle(run, index)))) : null;
  return el("div", {}, problems, titles, el("div", { class: "charts" }, ids.map((id) => curveCard(id, runs, answers))));
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
