// Where answers come from: the server, or, in a report, what was embedded into the file.

const LISTS = { groups: filterGroups, sequences: filterSequences };

export const embedded = readEmbedded();

function readEmbedded() {
  const block = document.getElementById("embedded");
  return block ? JSON.parse(block.textContent) : null;
}

export async function listRuns() {
  return embedded ? embedded.runs : fetchJson("api/runs");
}

/** The answer to a question about a run. Throws an Error whose message is for people. */
export async function ask(run, question, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  if (!embedded) return fetchJson(`api/${run}/${question}?${new URLSearchParams(given)}`);
  const answers = embedded.answers[run];
  if (question in LISTS) return LISTS[question](answers[question], params);
  const key = "id" in params ? `${question} ${params.id}` : question;
  if (!(key in answers)) throw new Error("This is not part of the report: its size is limited. `rl view` shows everything.");
  return answers[key];
}

async function fetchJson(path) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin" });
  } catch {
    throw new Error("The server does not answer: is `rl view` still running?");
  }
  const body = await response.json().catch(() => ({ error: response.statusText }));
  if (!response.ok) throw new Error(body.error);
  return body;
}

function filterGroups(list, { env, step, state, sort }) {
  const orders = {
    newest: (a, b) => b.step - a.step,
    oldest: (a, b) => a.step - b.step,
    spread: (a, b) => b.spread - a.spread,
    best: (a, b) => b.reward_mean - a.reward_mean,
    worst: (a, b) => a.reward_mean - b.reward_mean,
    failed: (a, b) => b.num_failed - a.num_failed,
  };
  const kept = list.groups.filter((group) => !state || group.state.startsWith(state));
  const groups = common(kept, env, step).sort(orders[sort || "newest"]);
  return { total: groups.length, page_rows: groups.length + 1, groups };
}

function filterSequences(list, { env, step, masked, sort }) {
  const orders = {
    newest: (a, b) => b.step - a.step,
    ratio: (a, b) => b.max_ratio - a.max_ratio,
    low_ratio: (a, b) => a.min_ratio - b.min_ratio,
    kl: (a, b) => b.max_kl - a.max_kl,
    entropy: (a, b) => b.max_entropy - a.max_entropy,
    masked: (a, b) => b.num_masked - a.num_masked,
    advantage: (a, b) => b.advantage - a.advantage,
    low_advantage: (a, b) => a.advantage - b.advantage,
  };
  const kept = list.sequences.filter((sequence) => masked !== "1" || sequence.num_masked > 0);
  const sequences = common(kept, env, step).sort(orders[sort || "newest"]);
  return { total: sequences.length, page_rows: sequences.length + 1, sequences };
}

function common(rows, env, step) {
  return rows.filter((row) => (!env || row.env_name === env) && (!step || row.step === Number(step)));
}
