"""Groups and rollouts of a run, as answers for a page; messages of any shape become roles and text."""

import json

import msgspec

from viewer.answers.params import PAGE_ROWS, Params, choice, filters, numbers, page_offset
from viewer.errors import NotRecorded
from viewer.index.run import Json, Run
from viewer.index.run_index import Row


class Said(msgspec.Struct, frozen=True):
    """A message of a conversation, as a page shows it."""

    role: str
    text: str


def conversation(messages: object) -> list[Said]:
    """Every message as text. Tool calls, and parts that are neither text nor images, are shown as JSON."""
    if not isinstance(messages, list):
        return []
    return [_said(message) for message in messages]


def split_prompt(said: list[Said]) -> tuple[list[Said], list[Said]]:
    """(what the rollout began with, everything from the first answer on)."""
    first = next((place for place, message in enumerate(said) if message.role == "assistant"), len(said))
    return said[:first], said[first:]


def _said(message: object) -> Said:
    if not isinstance(message, dict):
        return Said("?", _text(message))
    extras = [name for name in ("reasoning_content", "tool_calls") if message.get(name)]
    parts = [_text(message.get("content")), *(f"{name}: {_text(message[name])}" for name in extras)]
    return Said(str(message.get("role", "?")), "\n".join(part for part in parts if part))


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part) for part in content)
    return json.dumps(content, ensure_ascii=False, default=str)


def _part(part: object) -> str:
    """A part of a message: its text, or a word for an image, whose bytes would fill the page."""
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, dict) and "image" in str(part.get("type", "")):
        return "[image]"
    return json.dumps(part, ensure_ascii=False, default=str)


ORDERS = {
    "newest": "step DESC, group_id",
    "oldest": "step, group_id",
    "spread": "spread DESC, step DESC",
    "best": "reward_mean DESC, step DESC",
    "worst": "reward_mean, step DESC",
    "failed": "num_failed DESC, step DESC",
}
STATES = {"": "", "trained": "trained", "filtered": "filtered", "failed": "failed"}
MAX_ROLLOUTS = 64
"""Members of a group that are shown."""
MAX_CHARS = 20_000
"""Of a message, where rollouts stand side by side; a rollout by itself is shown whole."""


def list_groups(run: Run, params: Params) -> Json:
    """One page of groups: `env`, `step`, `state`, `sort`, `page`."""
    state = choice(params, "state", STATES, "")
    where, values = filters(params, {"substr(state, 1, ?) = ?": (len(state), state)} if state else {})
    order = choice(params, "sort", ORDERS, "newest")
    total = run.index.select(f"SELECT COUNT(*) AS total FROM groups {where}", values)[0]["total"]
    page = f"SELECT * FROM groups {where} ORDER BY {order} LIMIT ? OFFSET ?"
    exported = "(SELECT COUNT(*) FROM tokens WHERE tokens.group_id = page.group_id) AS num_exported"
    rows = run.index.select(f"SELECT *, {exported} FROM ({page}) AS page", (*values, PAGE_ROWS, page_offset(params)))
    return {"total": total, "page_rows": PAGE_ROWS, "groups": rows}


def show_group(run: Run, params: Params) -> Json:
    """The group `id`: its prompt, and its rollouts side by side, best first. Raises `NotRecorded`."""
    group_id = params.get("id", "")
    found = run.index.select("SELECT * FROM groups WHERE group_id = ? ORDER BY step DESC LIMIT 1", (group_id,))
    if not found:
        raise NotRecorded(f"group {group_id} is not recorded in this run")
    query = "SELECT step, line FROM rollouts WHERE group_id = ? AND step = ? ORDER BY reward DESC, line LIMIT ?"
    places = run.index.select(query, (group_id, found[0]["step"], MAX_ROLLOUTS))
    rollouts = [_rollout(run, int(place["step"] or 0), int(place["line"] or 0)) for place in places]
    prompt = next((rollout["prompt"] for rollout in rollouts if rollout["prompt"]), [])
    return {"group": found[0], "prompt": prompt, "rollouts": rollouts, "visits": visits(run, found[0])}


def show_rollout(run: Run, params: Params) -> Json:
    """The rollout `id` (`step.line`), whole. Raises `NotRecorded`."""
    step, line = numbers(params, "id", 2)
    return _rollout(run, step, line, whole=True)


def visits(run: Run, group: Row) -> list[Row]:
    """How the same example went over the run, oldest first."""
    query = (
        "SELECT group_id, step, state, reward_mean, reward_max, num_rollouts FROM groups "
        "WHERE env_name = ? AND example_id = ? ORDER BY step LIMIT 30"
    )
    return run.index.select(query, (group["env_name"], group["example_id"]))


def _rollout(run: Run, step: int, line: int, *, whole: bool = False) -> Json:
    record = run.rollout_line(step, line)
    said = conversation(record.pop("messages", None))
    prompt, answer = split_prompt(said if whole else [_cut(one) for one in said])
    trajectory_id = str(record.get("trajectory_id", ""))
    query = "SELECT step, rank, line, advantage FROM tokens WHERE trajectory_id = ? AND step = ? ORDER BY step_index"
    exported = run.index.select(query, (trajectory_id, step)) if record.get("failure") is None else []
    columns = record.pop("state_columns", None)
    # What the trainer exported is what it trained with: a critic makes its own advantages from the rewards it is sent.
    trained_with = next((row["advantage"] for row in exported), None)
    shown = record | {
        "id": f"{step}.{line}",
        "advantage": record.get("advantage") if trained_with is None else trained_with,
        "step": step,
        "prompt": prompt,
        "answer": answer,
        "sequences": [f"{row['step']}.{row['rank']}.{row['line']}" for row in exported],
    }
    return shown | {"state_columns": columns} if whole else shown


def _cut(said: Said) -> Said:
    left = len(said.text) - MAX_CHARS
    if left <= 0:
        return said
    return Said(said.role, f"{said.text[:MAX_CHARS]}… ({left:,} more characters: open the rollout)")
