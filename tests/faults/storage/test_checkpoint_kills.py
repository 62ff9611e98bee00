"""Row 13: `kill -9` at random instants and in every phase of a save. `--kills 200` is the long form (`make faults`)."""

import random
from pathlib import Path

import pytest

from tests.faults.conftest import Record
from tests.faults.storage.save_kills import SaveKills
from trainer.checkpoints.manifest import MANIFEST_NAME

pytestmark = [pytest.mark.integration, pytest.mark.long]
NUM_KILLS = 10
SEED = 11
PHASES = ("progress.json", "hf/config.json", "shard-00001-model-00001-of-00001.safetensors", MANIFEST_NAME)
"""Files in the order in which a save writes them."""


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_killed_save_costs_no_complete_checkpoint(
    tmp_path: Path, model_path: Path, background: bool, kills: int | None, record: Record
) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    campaign = SaveKills(root, model_path, random.Random(SEED), background)
    num_kills = kills or NUM_KILLS
    for _ in range(num_kills):
        campaign.kill_once()
    assert campaign.num_resumed == sum(campaign.hits.values()) == num_kills
    torn = num_kills - campaign.hits["after the save"] - campaign.hits["manifest written"]
    assert torn > 0, f"no kill hit a save: {campaign.hits}"
    figures = {
        "kills": num_kills,
        "resumed_from_a_valid_checkpoint": campaign.num_resumed,
        "kills_by_instant": dict(campaign.hits.most_common()),
        "save_ms": round(1000 * campaign.save_s, 1),
        "seed": SEED,
    }
    record("checkpoint_kills" + "_background" * background, figures)


def test_a_save_killed_in_any_phase_costs_no_complete_checkpoint(tmp_path: Path, model_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    campaign = SaveKills(root, model_path, random.Random(12))
    for last_seen in PHASES:
        campaign.kill_once(last_seen)
    assert campaign.num_resumed == len(PHASES)
