// How a token is coloured: each measure has a name, a meaning, a colour for a value, and the value itself.

const GREEN = "16, 152, 96";
const RED = "224, 49, 85";
const AMBER = "240, 150, 20";
const BLUE = "47, 111, 222";
const VIOLET = "132, 70, 214";
const GREY = "128, 134, 148";

function tint(rgb, strength) {
  const alpha = Math.min(1, Math.max(0, strength));
  return alpha < 0.02 ? "transparent" : `rgba(${rgb}, ${(0.08 + 0.72 * alpha).toFixed(3)})`;
}

function twoSided(value, full) {
  return tint(value >= 0 ? GREEN : RED, Math.abs(value) / full);
}

export const MEASURES = {
  push: {
    name: "push",
    hint: "advantage × ratio × (1 − p): how hard the update pulls at the token. Pale: the policy was sure already, or the loss masked it.",
    value: (sequence, place) => sequence.push[place],
    colour: (value) => twoSided(value, 1.5),
    ends: ["made less likely", "made more likely"],
    ramp: [-1.5, 1.5],
  },
  advantage: {
    name: "advantage",
    hint: "How much better than its group the rollout was; with a critic, than the critic expected at this token.",
    value: (sequence, place) => sequence.advantage[place],
    colour: (value) => twoSided(value, 2),
    ends: ["worse than expected", "better"],
    ramp: [-2, 2],
  },
  ratio: {
    name: "ratio",
    hint: "Probability under the trained policy over probability when it was sampled. 1: nothing has changed since.",
    value: (sequence, place) => sequence.ratio[place],
    colour: (value) => twoSided(Math.log(Math.max(value, 1e-6)), Math.log(3)),
    ends: ["1/3", "3"],
    ramp: [1 / 3, 3],
  },
  entropy: {
    name: "entropy",
    hint: "How undecided the policy was here (nats).",
    value: (sequence, place) => sequence.entropy[place],
    colour: (value) => tint(AMBER, value / 2),
    ends: ["sure", "undecided"],
    ramp: [0, 2],
  },
  mismatch_kl: {
    name: "mismatch KL",
    hint: "ratio − 1 − log ratio: how far sampling and trained policy are apart at this token.",
    value: (sequence, place) => sequence.mismatch_kl[place],
    colour: (value) => tint(VIOLET, Math.sqrt(Math.max(value, 0) / 0.2)),
    ends: ["0", "0.2 and more"],
    ramp: [0, 0.2],
  },
  log_ratio: {
    name: "logprob difference",
    hint: "Log probability under the trained policy minus when it was sampled.",
    value: (sequence, place) => sequence.log_ratio[place],
    colour: (value) => twoSided(value, 0.5),
    ends: ["−0.5", "+0.5"],
    ramp: [-0.5, 0.5],
  },
  mask: {
    name: "mask",
    hint: "Blue: trained. Amber: masked, its probability had risen too much. Violet: masked, it had fallen too much. Bare: not trained (the prompt).",
    value: (sequence, place) => maskOf(sequence, place),
    colour: (value) => ({ trained: tint(BLUE, 0.35), high: tint(AMBER, 1), low: tint(VIOLET, 1), masked: tint(RED, 1) })[value],
    ends: ["", ""],
    ramp: null,
  },
  version: {
    name: "policy version",
    hint: "Which version of the policy sampled the token; a bar marks where it changed.",
    value: (sequence, place) => versionAt(sequence, place),
    colour: (value) => tint([BLUE, AMBER, GREEN, VIOLET, RED, GREY][value % 6], 0.4),
    ends: ["", ""],
    ramp: null,
  },
};

export function maskOf(sequence, place) {
  if (!sequence.loss_mask[place]) return null;
  if (!sequence.is_masked[place]) return "trained";
  if (sequence.is_masked_high[place]) return "high";
  return sequence.is_masked_low[place] ? "low" : "masked";
}

export function versionAt(sequence, place) {
  const span = (sequence.versions ?? []).find(([, start, end]) => start <= place && place < end);
  return span ? span[0] : null;
}
