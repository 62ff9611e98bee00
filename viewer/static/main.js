// Chooses the page by the address (#/page?key=value), draws the header, and draws a live run again as it grows.

import { el, link } from "./dom.js";
import { number } from "./format.js";
import { batchesPage } from "./page_batches.js";
import { circlePage } from "./page_circle.js";
import { curvesPage } from "./page_curves.js";
import { groupPage, groupsPage } from "./page_groups.js";
import { rolloutPage, sequencePage } from "./page_rollout.js";
import { startPage } from "./page_start.js";
import { tokensPage } from "./page_tokens.js";
import { problem, runTitle } from "./parts.js";
import { ask, embedded, listRuns } from "./source.js";
import { hideTip } from "./tip.js";

const TABS = { start: "Why", curves: "Curves", circle: "Circle", batches: "Batches", groups: "Groups", tokens: "Tokens" };
const PAGES = { start: startPage, curves: curvesPage, circle: circlePage, batches: batchesPage, groups: groupsPage, group: groupPage, rollout: rolloutPage, sequence: sequencePage, tokens: tokensPage };
const LIVE_PAGES = ["curves", "circle", "batches"];
const TICK_MS = 3000;

let runs = [];
let drawing = 0;
let shownView = "";

function place() {
  const [name, query] = window.location.hash.replace(/^#\//, "").split("?");
  const page = Object.hasOwn(PAGES, name) ? name : "start";
  return { page, params: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

async function draw({ quietly = false } = {}) {
  const mine = ++drawing;
  const { page, params } = place();
  const target = document.getElementById("page");
  if (!quietly) target.classList.add("loading");
  const content = await PAGES[page](runs, params).catch(problem);
  if (mine !== drawing) return; // another page was asked for meanwhile
  hideTip();
  target.replaceChildren(content);
  target.classList.remove("loading");
  target.dataset.page = page;
  const view = `${page} ${params.id ?? ""} ${params.page ?? ""}`; // a changed filter does not move the reader
  if (view !== shownView) window.scrollTo(0, 0);
  shownView = view;
  drawTabs(page);
}

function drawTabs(page) {
  for (const tab of document.querySelectorAll("#header nav a")) tab.classList.toggle("chosen", tab.dataset.tab === page);
}

function drawHeader() {
  const tabs = Object.entries(TABS).map(([page, name]) => {
    const tab = link(page, {}, name);
    tab.dataset.tab = page;
    return tab;
  });
  const names = runs.map((run, index) => el("span", { class: "run-name" }, runs.length > 1 ? runTitle(run, index) : run.name, el("span", { class: "badge", id: `badge-${run.id}` })));
  document.getElementById("header").replaceChildren(el("strong", { class: "brand" }, "Tandem"), el("div", { class: "runs" }, names), el("nav", {}, tabs));
  document.title = `${runs.map((run) => run.name).join(" and ")} · Tandem`;
}

async function drawBadge(run) {
  const [circle, overview] = await Promise.all([ask(run.id, "circle").catch(() => null), ask(run.id, "overview").catch(() => null)]);
  const badge = document.getElementById(`badge-${run.id}`);
  const step = overview ? `step ${number(overview.last_step)}` : "";
  const isLive = !embedded && circle !== null && circle.is_live;
  badge.textContent = isLive ? `live · ${step}` : step;
  badge.classList.toggle("live", isLive);
  return isLive;
}

async function tick() {
  const live = await Promise.all(runs.map(drawBadge));
  if (live.includes(true) && LIVE_PAGES.includes(place().page)) await draw({ quietly: true });
  window.setTimeout(tick, TICK_MS);
}

async function start() {
  const names = await listRuns();
  runs = names.map((run, id) => ({ ...run, id }));
  drawHeader();
  window.addEventListener("hashchange", () => draw());
  await draw();
  if (embedded) await Promise.all(runs.map(drawBadge));
  else await tick();
}

start().catch((error) => document.getElementById("page").replaceChildren(problem(error)));
