// The text of a sequence, token by token: coloured by a measure, all numbers on hover, filters that dim the rest.

import { checkbox, el, select } from "./dom.js";
import { MEASURES, maskOf, versionAt } from "./colours.js";
import { number, signed } from "./format.js";
import { hideTip, showTip } from "./tip.js";

const MASK_WORDS = { trained: "trained", high: "masked: had become too likely", low: "masked: had become too unlikely", masked: "masked" };
const MAX_DRAWN = 6000;
/** Longer sequences are not drawn inside lists: open them. */
export const MAX_INLINE = 3000;

/** sequence as the server gives it; `prompt`: whether tokens that are not trained are shown; `tools`: with controls. */
export function tokenView(sequence, { measure = "push", prompt = true, tools = true } = {}) {
  const state = { measure, prompt, masked: false, minRatio: 0, limit: MAX_DRAWN };
  const text = el("div", { class: "tokens", "data-sequence": sequence.id });
  const legend = el("div", { class: "ramp" });
  const draw = () => {
    text.replaceChildren(...tokens(sequence, state), ...moreButton(sequence, state, draw));
    legend.replaceChildren(...describe(MEASURES[state.measure]));
  };
  draw();
  return el("div", { class: "token-view" }, tools ? controls(sequence, state, draw) : null, tools ? legend : null, text);
}

/** A browser is slow with a hundred thousand elements: the rest comes when it is asked for. */
function moreButton(sequence, state, draw) {
  const left = sequence.texts.length - state.limit;
  if (left <= 0) return [];
  const more = () => {
    state.limit += MAX_DRAWN;
    draw();
  };
  return [el("button", { type: "button", click: more }, `show more (${number(left)} tokens left)`)];
}

function controls(sequence, state, draw) {
  const change = (name) => (value) => {
    state[name] = value;
    draw();
  };
  const names = Object.fromEntries(Object.entries(MEASURES).map(([key, one]) => [key, one.name]));
  const largest = sequence.ratio.reduce((most, value) => (value === null ? most : Math.max(most, distance(value))), 1);
  const slider = el("input", {
    type: "range", min: 1, max: largest, step: (largest - 1) / 100 || 1, value: 1, "aria-label": "ratio at least",
    input: (event) => change("minRatio")(Number(event.target.value)),
  });
  return el(
    "div",
    { class: "controls" },
    select("colour by", names, state.measure, change("measure")),
    checkbox("prompt", state.prompt, change("prompt")),
    checkbox("masked tokens only", state.masked, change("masked")),
    el("label", { class: "control" }, "largest ratios only", slider),
  );
}

/** A ratio of 1/3 is as far from 1 as one of 3. */
function distance(ratio) {
  return Math.max(ratio, 1 / Math.max(ratio, 1e-6));
}

function describe(measure) {
  const ramp = measure.ramp && el("i", { class: "gradient", style: { background: gradient(measure) } });
  return [measure.ends[0], ramp, measure.ends[1], el("span", { class: "hint" }, measure.hint)].filter(Boolean);
}

function gradient({ ramp: [low, high], colour }) {
  const stops = Array.from({ length: 9 }, (_, place) => colour(low + ((high - low) * place) / 8));
  return `linear-gradient(90deg, ${stops.join(", ")})`;
}

function tokens(sequence, state) {
  const shown = [];
  let version = null;
  sequence.texts.slice(0, state.limit).forEach((text, place) => {
    if (!state.prompt && !sequence.loss_mask[place]) return;
    const now = versionAt(sequence, place);
    if (now !== null && now !== version) {
      shown.push(el("span", { class: "version", title: `sampled by policy version ${now}` }, `v${now}`));
      version = now;
    }
    shown.push(token(sequence, place, text, state));
    if (text.includes("\n")) shown.push(el("br"));
  });
  return shown;
}

function token(sequence, place, text, state) {
  const measure = MEASURES[state.measure];
  const value = measure.value(sequence, place);
  const trained = sequence.loss_mask[place];
  const classes = ["token", trained ? "trained" : "given", sequence.is_masked[place] ? "masked" : "", isDim(sequence, place, state) ? "dim" : ""];
  const colour = trained && value !== null && value !== undefined ? measure.colour(value) : "transparent";
  const show = (event) => showTip(event, tokenTable(sequence, place));
  return el(
    "span",
    {
      class: classes.join(" ").trim(), "data-place": place, tabindex: trained ? 0 : null, style: { "background-color": colour },
      mouseenter: show, mousemove: show, focus: show, mouseleave: hideTip, blur: hideTip,
    },
    text === "" ? "∅" : text.replaceAll("\n", "↵"),
  );
}

function isDim(sequence, place, state) {
  if (state.masked && !sequence.is_masked[place]) return true;
  if (state.minRatio <= 1) return false;
  const ratio = sequence.ratio[place];
  return ratio === null || distance(ratio) < state.minRatio;
}

function tokenTable(sequence, place) {
  const rows = [
    ["token", `${JSON.stringify(sequence.texts[place])}  id ${sequence.token_ids[place]}  at ${place}`],
    ["policy version", versionAt(sequence, place) ?? "–"],
    ["advantage", signed(sequence.advantage[place], 3)],
    ["push", signed(sequence.push[place], 3)],
    ["ratio", number(sequence.ratio[place], 4)],
    ["logprob when sampled", number(sequence.inference_logprobs[place], 4)],
    ["logprob when trained", number(sequence.trainer_logprobs[place], 4)],
    ["logprob difference", number(sequence.log_ratio[place], 4)],
    ["probability change", number(sequence.prob_delta[place], 4)],
    ["mismatch KL", number(sequence.mismatch_kl[place], 4)],
    ["entropy", number(sequence.entropy[place], 4)],
    ["mask", MASK_WORDS[maskOf(sequence, place)] ?? "not trained"],
  ];
  const kept = sequence.loss_mask[place] ? rows : [rows[0], rows.at(-1)];
  return el("table", { class: "token-table" }, kept.map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, value))));
}

/** Each trained token as a box with its push below: for short answers, where everything can be seen at once. */
export function pushedTokens(sequence) {
  const boxes = sequence.texts.flatMap((text, place) => {
    if (!sequence.loss_mask[place]) return [];
    const state = { measure: "push", masked: false, minRatio: 0 };
    const push = sequence.push[place];
    return [
      el(
        "div",
        { class: "pushed" },
        token(sequence, place, text, state),
        el("small", { class: push > 0 ? "up" : push < 0 ? "down" : "" }, sequence.is_masked[place] ? "masked" : signed(push)),
      ),
    ];
  });
  return el("div", { class: "pushed-row" }, boxes);
}
