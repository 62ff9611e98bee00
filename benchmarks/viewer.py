"""How fast `rl view` opens a large run, and how fast its pages answer.

    python -m benchmarks.viewer [--rollouts 100000]

The run is generated: rollouts in groups of 8 and batches of 512, conversations of about 2 kB, and 64 exported sequences
of 160 tokens per step. `cold` is the first look, which builds the index; `warm` a later one. Pages are the time of one
answer, JSON included, the median of several. Wall-clock seconds on one core; the files are in the page cache.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec

from benchmarks import harness
from viewer.answers.answers import answer
from viewer.index.run import Run
from viewer.views.report import make_report

GROUP_SIZE = 8
BATCH = 512
EXPORTED = 64
NUM_TOKENS = 160
NUM_PROMPT = 60
REPEATS = 15
PAGES: dict[str, tuple[str, dict[str, str]]] = {
    "first page": ("story", {}),
    "curves": ("curves", {}),
    "batches": ("batches", {}),
    "groups, newest": ("groups", {}),
    "groups, largest difference": ("groups", {"sort": "spread"}),
    "groups, a late page": ("groups", {"page": "200"}),
    "one group": ("group", {"id": "maths/e80/2"}),
    "one rollout": ("rollout", {"id": "2.100"}),
    "sequences, largest ratio": ("sequences", {"sort": "ratio"}),
    "sequences, masked, of one env": ("sequences", {"masked": "1", "env": "words"}),
    "one sequence": ("sequence", {"id": "2.0.10"}),
}


def make_large_run(path: Path, num_rollouts: int) -> None:
    """Write the files that a run of this size would have left."""
    draw = random.Random(0)
    for name in ("rollouts", "token_export", "metrics", "ledger", "services"):
        (path / name).mkdir(parents=True)
    for step in range(1, -(-num_rollouts // BATCH) + 1):
        rows = [_rollout(draw, step, place) for place in range(min(BATCH, num_rollouts - (step - 1) * BATCH))]
        _write(path / "rollouts" / f"step-{step:08d}.jsonl", rows)
        folder = path / "token_export" / f"step-{step:08d}"
        folder.mkdir()
        _write(
            folder / "rank-00000.jsonl",
            [_sequence(draw, step, row, place) for place, row in enumerate(rows[:EXPORTED])],
        )
        for service in ("orchestrator", "trainer"):
            with (path / "metrics" / f"{service}.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "reward/all/mean": draw.random(), "loss": draw.random()}) + "\n")


def _rollout(draw: random.Random, step: int, place: int) -> dict[str, object]:
    env = ("maths", "words")[place // GROUP_SIZE % 2]
    group = f"{env}/e{place // GROUP_SIZE * 2}/{step}"
    reward = float(draw.random() < 0.4)
    text = "".join(draw.choices("abcdefgh \n", k=1900))
    return {
        "env_name": env, "example_id": f"e{place // GROUP_SIZE}", "group_id": group,
        "trajectory_id": f"{group}#{place % GROUP_SIZE}", "state": f"trained@{step}", "advantage": reward - 0.4,
        "reward": reward, "num_tokens": NUM_TOKENS, "num_sampled_tokens": NUM_TOKENS - NUM_PROMPT,
        "oldest_version": step - 1, "newest_version": step - 1, "duration_s": 1.0,
        "messages": [{"role": "user", "content": "question"}, {"role": "assistant", "content": text}],
    }  # fmt: skip


def _sequence(draw: random.Random, step: int, row: dict[str, object], place: int) -> dict[str, object]:
    mask = [position >= NUM_PROMPT for position in range(NUM_TOKENS)]

    def column(low: float, high: float) -> list[float | None]:
        return [round(draw.uniform(low, high), 6) if trained else None for trained in mask]

    flags = [draw.random() < 0.01 if trained else None for trained in mask]
    names = ("env_name", "example_id", "group_id", "trajectory_id")
    return {name: row[name] for name in names} | {
        "step": step, "row": place, "rank": 0, "micro_batch": place // 12, "position": place % 12 * NUM_TOKENS,
        "micro_batch_tokens": 12 * NUM_TOKENS, "step_index": 0, "temperature": 1.0, "versions": [[step - 1, 60, 160]],
        "token_ids": [draw.randrange(50_000) for _ in mask], "loss_mask": mask, "reward": [row["reward"]] * NUM_TOKENS,
        "advantage": [row["advantage"]] * NUM_TOKENS, "inference_logprobs": column(-3, 0),
        "trainer_logprobs": column(-3, 0), "entropy": column(0, 2), "log_ratio": column(-0.1, 0.1),
        "ratio": column(0.9, 1.1), "mismatch_kl": column(0, 0.01), "prob_delta": column(-0.1, 0.1),
        "is_masked": flags, "is_masked_high": flags, "is_masked_low": flags,
    }  # fmt: skip


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def look(path: Path, cache: Path) -> Run:
    """Open a run as `rl view` does."""
    run = Run(path, cache)
    run.refresh()
    return run


def measure(rollouts: int) -> dict[str, object]:
    """All figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        path, cache = Path(folder) / "run", Path(folder) / "cache"
        make_large_run(path, rollouts)
        runs: list[Run] = []
        cold, warm = (_wall_s(lambda: runs.append(look(path, cache))) for _ in range(2))
        with closing(runs[0]), closing(runs[1]) as run:
            pages = {name: _page_ms(run, *question) for name, question in PAGES.items()}
            report_s = _wall_s(lambda: make_report([run], 8_000_000))
            counts = answer(run, "overview", {})["counts"]
        return {
            "counts": counts,
            "run_mb": round(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6, 1),
            "index_mb": round(sum(file.stat().st_size for file in cache.iterdir()) / 1e6, 1),
            "open_cold_s": round(cold, 2),
            "open_warm_s": round(warm, 3),
            "page_ms": pages,
            "report_s": round(report_s, 2),
        }


def _wall_s(work: Callable[[], object]) -> float:
    return harness.best_s(work, 1, time.perf_counter)


def _page_ms(run: Run, question: str, params: dict[str, str]) -> float:
    times = [_wall_s(lambda: msgspec.json.encode(answer(run, question, params))) for _ in range(REPEATS)]
    return round(1000 * statistics.median(times), 2)


if __name__ == "__main__":
    harness.main("viewer", __doc__, measure, rollouts=100_000)
