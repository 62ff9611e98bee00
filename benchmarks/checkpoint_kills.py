"""`python -m benchmarks.checkpoint_kills [--kills 200] [--background]`: kill -9 at random instants of checkpoint saves.

After each kill a new trainer must find a valid checkpoint, lose none that was complete, and hold bit for bit the state
of a run without kills. The first kill after which it does not ends the command with an error, and records nothing.
Figures go to section `checkpoint_kills` of `results/faults.json`.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from loguru import logger

from benchmarks.fault_results import RESULTS, Figures, record
from tests.faults.storage.save_kills import SaveKills


def kill_saves(num_kills: int, seed: int, folder: Path, *, background: bool = False) -> Figures:
    """Kill `num_kills` saves below `folder`; `background`: such as go on while training does."""
    started = time.monotonic()
    model_path = folder / "model"
    model_path.mkdir(parents=True)
    (model_path / "config.json").write_text(json.dumps({"model_type": "none"}))
    (folder / "checkpoints").mkdir()
    campaign = SaveKills(folder / "checkpoints", model_path, random.Random(seed), background)
    for number in range(1, num_kills + 1):
        campaign.kill_once()
        if number % 20 == 0:
            print(f"{number} kills: {dict(campaign.hits.most_common())}", flush=True)
    return {
        "kills": num_kills,
        "resumed_from_a_valid_checkpoint": campaign.num_resumed,
        "kills_by_instant": dict(campaign.hits.most_common()),
        "save_ms": round(1000 * campaign.save_s, 1),
        "seed": seed,
        "duration_s": round(time.monotonic() - started, 1),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--background", action="store_true", help="saves that go on while training does")
    parser.add_argument("--out", type=Path, default=RESULTS, help="results file")
    arguments = parser.parse_args()
    logger.disable("trainer")  # says after every kill that it skips a torn checkpoint
    with tempfile.TemporaryDirectory(prefix="checkpoint-kills-") as folder:
        figures = kill_saves(arguments.kills, arguments.seed, Path(folder), background=arguments.background)
    record("checkpoint_kills" + "_background" * arguments.background, figures, arguments.out)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
