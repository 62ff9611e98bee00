"""A run directory as the services would have left it, made in milliseconds. Real writers are compared elsewhere
(`tests/integration/test_circle.py`, `answers/test_answers.py`)."""

import json
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from runtime.run_dir.run_dir import RunDir

ANSWER = "the answer is <b>"
NUM_PROMPT = 6


@dataclass(frozen=True)
class Shape:
    """What to make."""

    num_steps: int = 6
    num_groups: int = 4
    group_size: int = 4
    envs: tuple[str, ...] = ("maths", "words")
    answer: str = ANSWER
    """Text of the last message of every rollout, before its number."""
    with_tokens: bool = True
    learns: bool = True


def make_run(path: Path, shape: Shape | None = None) -> Path:
    """Write it; returns `path`."""
    shape = shape or Shape()
    run_dir = RunDir(path).create()
    model = path / "model"
    model.mkdir()
    byte_tokenizer().save(str(model / "tokenizer.json"))
    (run_dir.config / "rl.json").write_text(json.dumps({"model": {"path": str(model)}}))
    ledger = []
    for step in range(1, shape.num_steps + 1):
        rows = [row for place in range(shape.num_groups) for row in group_rows(shape, step, place)]
        lines(run_dir.rollouts / f"step-{step:08d}.jsonl", rows)
        if shape.with_tokens:
            write_tokens(run_dir, shape, step, [row for row in rows if "reward" in row])
        ledger += ledger_lines(shape, step)
        write_metrics(run_dir, shape, step)
    lines(run_dir.ledger / "rollouts.jsonl", ledger)
    return path


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token per byte, so that a character may need several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def reward_of(shape: Shape, step: int, index: int) -> float:
    """More members of a group succeed in later steps; the last one fails always."""
    share = step / shape.num_steps if shape.learns else 0.25
    return float(index < max(1, share * (shape.group_size - 1)))


def group_rows(shape: Shape, step: int, place: int) -> list[dict[str, object]]:
    """The rollouts of one group; the first group of a step has a failed one."""
    env = shape.envs[place % len(shape.envs)]
    example, group = f"example-{place}", f"{env}/example-{place}/{step}"
    rows: list[dict[str, object]] = []
    rewards = [reward_of(shape, step, index) for index in range(shape.group_size)]
    mean = sum(rewards) / len(rewards)
    for index, reward in enumerate(rewards):
        head = {"env_name": env, "example_id": example, "group_id": group, "trajectory_id": f"{group}#{index}"}
        messages = [
            {"role": "user", "content": f"question {place}"},
            {"role": "assistant", "content": f"{shape.answer} {index}"},
        ]
        rows.append(
            head
            | {"state": f"trained@{step}", "advantage": reward - mean, "reward": reward, "metrics": {"exact": reward}}
            | {"num_tokens": 12, "num_sampled_tokens": 6, "num_branches": 1, "is_truncated": False, "temperature": 1.0}
            | {"oldest_version": step - 1, "newest_version": step - 1, "duration_s": 0.5, "messages": messages}
            | {"state_columns": {"sampling_args": {"seed": 3}}}
        )
    if place == 0:
        lost = {"state": "failed:env_timeout", "advantage": None, "failure": "env_timeout", "message": "took <60 s>"}
        rows.append({key: rows[0][key] for key in ("env_name", "example_id", "group_id", "trajectory_id")} | lost)
    return rows


def write_tokens(run_dir: RunDir, shape: Shape, step: int, rows: list[dict[str, object]]) -> None:
    """The token export of a step: two ranks, every second sequence each, in micro batches of four."""
    folder = run_dir.token_export / f"step-{step:08d}"
    folder.mkdir()
    for rank in range(2):
        own = rows[rank::2]
        records = [token_record(step, rank, place, row, shape) for place, row in enumerate(own)]
        lines(folder / f"rank-{rank:05d}.jsonl", records)
    (folder / "STABLE").write_text("")


def token_record(step: int, rank: int, place: int, row: dict[str, object], shape: Shape) -> dict[str, object]:
    """One record: six tokens of prompt, then the answer; the token after the first is masked in bad rollouts."""
    text = "ask é:"[:NUM_PROMPT] + shape.answer
    ids = byte_tokenizer().encode(text).ids
    start = len(byte_tokenizer().encode("ask é:").ids)
    mask = [position >= start for position in range(len(ids))]
    num = len(ids)
    half = (start + num) // 2

    def column(value: float | bool) -> list[float | bool | None]:
        return [value if trained else None for trained in mask]

    ratios = column(1.0)
    ratios[start + 1] = 1.0 + place + step / 10
    bad = float(str(row["advantage"])) < 0
    masked = column(False)
    masked[start + 1] = bad
    return {
        "step": step, "row": place * 2 + rank, "rank": rank, "micro_batch": place // 4, "position": place % 4 * num,
        "micro_batch_tokens": 4 * num + 3, "env_name": row["env_name"], "example_id": row["example_id"],
        "group_id": row["group_id"], "trajectory_id": row["trajectory_id"], "step_index": 0, "temperature": 1.0,
        "versions": [[step - 1, start, half], [step, half, num]], "token_ids": ids, "loss_mask": mask,
        "reward": [row["reward"]] * num, "advantage": [row["advantage"]] * num,
        "inference_logprobs": column(-0.5), "trainer_logprobs": column(-0.25), "entropy": column(0.75),
        "log_ratio": column(0.25), "ratio": ratios, "mismatch_kl": column(0.01), "prob_delta": column(0.17),
        "is_masked": masked, "is_masked_high": masked, "is_masked_low": column(False),
    }  # fmt: skip


def ledger_lines(shape: Shape, step: int) -> list[dict[str, object]]:
    """Everything was trained, but one try that failed and was made again."""
    found: list[dict[str, object]] = []
    for place in range(shape.num_groups):
        seq = (step - 1) * shape.num_groups + place
        found.append({"kind": "dispatched", "seq": seq, "group": f"g{seq}", "size": shape.group_size})
        if place == 0:
            found.append({"kind": "retried", "seq": seq, "index": 0, "state": "failed:env_timeout"})
        found.append({"kind": "settled", "seq": seq, "states": [f"trained@{step}"] * shape.group_size})
    return found


def write_metrics(run_dir: RunDir, shape: Shape, step: int) -> None:
    """One row of each service."""
    rewards = [reward_of(shape, step, index) for index in range(shape.group_size)]
    mean = sum(rewards) / len(rewards)
    names = ("all", *shape.envs)
    generated = {"step": step, "time": 1000.0 + step, "throughput/all/tokens_per_s": 900.0, "time/all/step_s": 2.0}
    generated |= {"time/all/waited_for_policy_s": 0.5, "filtered/all/share": 0.1, "failures/all/share": 0.05}
    generated |= {f"reward/{name}/mean": mean for name in names} | {f"length_bias/{name}/ratio": 1.0 for name in names}
    trained = {"step": step, "time": 1000.5 + step, "loss": 0.1 / step, "grad_norm": 1.0, "tokens_per_s": 5000.0}
    trained |= {"time/step_s": 2.0, "time/wait_s": 0.5, "staleness/mean": 1.0, "staleness/max": 2.0}
    for name in names:
        trained |= {f"entropy/{name}/mean": 1.0 / step, f"mismatch_kl/{name}/mean": 0.01, f"reward/{name}/mean": mean}
    for service, row in (("orchestrator", generated), ("trainer", trained)):
        with (run_dir.metrics / f"{service}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def lines(path: Path, rows: list[dict[str, object]]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
