"""Row 13: `kill -9` at random instants and in every phase of a save.

`python -m benchmarks.checkpoint_kills` is the long form.
"""

import random
from pathlib import Path

import pytest

from tests.faults.storage.save_kills import SaveKills
from trainer.checkpoint_manifest import MANIFEST_NAME

pytestmark = pytest.mark.integration
NUM_KILLS = 10
PHASES = ("progress.json", "hf/config.json", "shard-00001-model-00001-of-00001.safetensors", MANIFEST_NAME)
"""Files in the order in which a save writes them."""


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_killed_save_costs_no_complete_checkpoint(tmp_path: Path, model_path: Path, background: bool) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    campaign = SaveKills(root, model_path, random.Random(11), background)
    for _ in range(NUM_KILLS):
        campaign.kill_once()
    assert campaign.num_resumed == sum(campaign.hits.values()) == NUM_KILLS
    torn = NUM_KILLS - campaign.hits["after the save"] - campaign.hits["manifest written"]
    assert torn > 0, f"no kill hit a save: {campaign.hits}"


def test_a_save_killed_in_any_phase_costs_no_complete_checkpoint(tmp_path: Path, model_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    campaign = SaveKills(root, model_path, random.Random(12))
    for last_seen in PHASES:
        campaign.kill_once(last_seen)
    assert campaign.num_resumed == len(PHASES)
