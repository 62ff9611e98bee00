"""Exported sequences of a run, token by token, as answers for a page."""

import math

from viewer.answers.params import Params, choice, filters, numbers, page_offset
from viewer.index.run import Json, Run
from viewer.index.run_index import Row

ORDERS = {
    "newest": "step DESC, rank, line",
    "ratio": "max_ratio DESC",
    "low_ratio": "min_ratio IS NULL, min_ratio",
    "kl": "max_kl DESC",
    "entropy": "max_entropy DESC",
    "masked": "num_masked DESC, step DESC",
    "advantage": "advantage DESC",
    "low_advantage": "advantage",
}
NUMBERS = (
    "advantage",
    "inference_logprobs",
    "trainer_logprobs",
    "entropy",
    "log_ratio",
    "ratio",
    "mismatch_kl",
    "prob_delta",
)
FLAGS = ("is_masked", "is_masked_high", "is_masked_low")
PLACE = ("step", "row", "rank", "micro_batch", "position", "micro_batch_tokens")
NAMES = ("env_name", "example_id", "group_id", "trajectory_id", "step_index")
GIVEN = ("temperature", "versions", "token_ids", "loss_mask")
PAGE_ROWS = 20
"""Fewer than of other lists: each is shown with its tokens."""
DIGITS = 6
"""Significant digits that are sent: what float32 has."""


def list_sequences(run: Run, params: Params) -> Json:
    """One page of sequences: `env`, `step`, `masked` (1: with masked tokens only), `sort`, `page`."""
    where, values = filters(params, {"num_masked > 0": ()} if params.get("masked") == "1" else {})
    order = choice(params, "sort", ORDERS, "newest")
    total = run.index.select(f"SELECT COUNT(*) AS total FROM tokens {where}", values)[0]["total"]
    query = f"SELECT * FROM tokens {where} ORDER BY {order} LIMIT ? OFFSET ?"
    rows = run.index.select(query, (*values, PAGE_ROWS, page_offset(params, PAGE_ROWS)))
    return {"total": total, "page_rows": PAGE_ROWS, "sequences": [with_id(row) for row in rows]}


def show_sequence(run: Run, params: Params) -> Json:
    """The sequence `id` (`step.rank.line`): text and numbers of every token. Raises `NotRecorded`."""
    step, rank, line = numbers(params, "id", 3)
    record = run.token_line(step, rank, line)
    shown: Json = {name: record.get(name) for name in (*PLACE, *NAMES, *GIVEN)}
    ids = [int(token) for token in _column(record, "token_ids")]
    rewards = _column(record, "reward")
    shown |= {name: [_short(value) for value in _column(record, name)] for name in NUMBERS}
    shown |= {name: _column(record, name) for name in FLAGS}
    rollout = run.index.select(
        "SELECT step, line FROM rollouts WHERE trajectory_id = ? AND step = ? AND failure IS NULL",
        (str(record.get("trajectory_id")), step),
    )
    return shown | {
        "id": f"{step}.{rank}.{line}",
        "reward": rewards[0] if rewards else None,
        "texts": run.text.texts(ids),
        "push": [_short(value) for value in push(record)],
        "rollout": f"{rollout[0]['step']}.{rollout[0]['line']}" if rollout else None,
    }


def show_packed_row(run: Run, params: Params) -> Json:
    """The exported sequences of micro batch `id` (`step.rank.micro_batch`), in the order they were packed."""
    query = "SELECT * FROM tokens WHERE step = ? AND rank = ? AND micro_batch = ? ORDER BY position"
    rows = run.index.select(query, numbers(params, "id", 3))
    return {"sequences": [with_id(row) for row in rows]}


def push(record: Json) -> list[float | None]:
    """How hard the update pulls at each token: `advantage * ratio * (1 - p)`, 0 where the loss masked it.

    That is the gradient of a policy loss by the logit of the token: positive makes it likelier. A token that the
    policy is sure of (p near 1) hardly moves, however large the advantage.
    """
    columns = [_column(record, name) for name in ("advantage", "ratio", "trainer_logprobs", "is_masked")]
    return [_pushed(*values) for values in zip(*columns, strict=False)]


def _pushed(advantage: object, ratio: object, logprob: object, masked: object) -> float | None:
    if not (isinstance(advantage, float | int) and isinstance(ratio, float | int) and isinstance(logprob, float | int)):
        return None
    return 0.0 if masked else advantage * ratio * (1.0 - math.exp(min(logprob, 0.0)))


def with_id(row: Row) -> Row:
    """The row of a sequence with the id that pages use."""
    return row | {"id": f"{row['step']}.{row['rank']}.{row['line']}"}


def _column(record: Json, name: str) -> list[float]:
    value = record.get(name)
    return value if isinstance(value, list) else []


def _short(value: object) -> float | None:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float | int) else None
