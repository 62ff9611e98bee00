"""The loop turns: reward rises, trainer and engine agree, the result is a model that anyone can load."""

import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.deploy.test_observability import OF_A_STEP, used_metrics
from tests.docs.pages import NUM_STEPS, OUTPUT, RUN
from tests.integration.circle import ROOT, Finished, environment, run_rl
from tests.support.process import Process
from viewer.answers.answers import answer
from viewer.index.run import Run

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def trained(first_run: Path) -> Finished:
    """The run that the documentation shows, too: two FSDP ranks and the embedded engine."""
    return Finished(first_run / RUN, 0, (first_run / OUTPUT).read_text())


def test_two_ranks_and_the_embedded_engine_make_reward_rise(trained: Finished) -> None:
    rewards = trained.column("orchestrator", "reward/all/mean")
    assert len(rewards) == NUM_STEPS
    assert statistics.mean(rewards[-5:]) >= statistics.mean(rewards[:5]) + 0.25


def test_every_step_is_trained_once_and_none_is_too_stale(trained: Finished) -> None:
    assert trained.column("trainer", "step") == list(range(1, NUM_STEPS + 1))
    assert max(trained.column("orchestrator", "staleness/all/max")) <= 2


def test_alerts_and_dashboards_name_metrics_that_the_run_had(trained: Finished) -> None:
    recorded = {
        f"tandem_{service}_" + re.sub(r"[^A-Za-z0-9_]", "_", key)
        for service in ("trainer", "orchestrator")
        for key in trained.metrics(service)[-1]
    }
    assert {name for name in used_metrics() if re.match(OF_A_STEP, name)} <= recorded


def test_ledger_of_a_finished_run_balances(trained: Finished) -> None:
    command = [sys.executable, "-m", "orchestrator", "ledger", str(trained.path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_viewer_finds_a_good_and_a_bad_rollout_and_the_packed_rows_of_their_tokens(trained: Finished) -> None:
    with closing(Run(trained.path, None)) as run:
        story = answer(run, "story", {})
        assert story["rewards"]["last"] > story["rewards"]["first"]
        good, bad = (answer(run, "rollout", {"id": story[kind]}) for kind in ("good", "bad"))
        assert good["reward"] > bad["reward"]
        for rollout in (good, bad):
            sequence = answer(run, "sequence", {"id": rollout["sequences"][0]})
            assert sequence["trajectory_id"] == rollout["trajectory_id"]
            assert len(sequence["texts"]) == rollout["num_tokens"]
            row_id = f"{sequence['step']}.{sequence['rank']}.{sequence['micro_batch']}"
            assert sequence["id"] in [one["id"] for one in answer(run, "packed_row", {"id": row_id})["sequences"]]


def test_final_checkpoint_exports_to_a_model_with_the_published_weights(
    trained: Finished, tmp_path: Path, start: Callable[..., Process]
) -> None:
    out = tmp_path / "exported"
    start("trainer", "export", "--run", str(trained.path), "--out", str(out), warm=True).finish()
    exported = AutoModelForCausalLM.from_pretrained(out)
    published = AutoModelForCausalLM.from_pretrained(out)
    shards = sorted((trained.path / "weights" / f"v{NUM_STEPS:08d}").glob("*.safetensors"))
    weights = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    missing, unexpected = published.load_state_dict(weights, strict=False)
    assert unexpected == []
    assert all("lm_head" in name for name in missing)
    prompt = AutoTokenizer.from_pretrained(out)("abc", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(exported(prompt).logits, published(prompt).logits)


def test_importance_ratio_is_one_when_nothing_is_stale(tmp_path: Path, copy_model: Path) -> None:
    """And the weights travel without a shared disk."""
    flags = ("--max-steps", "4", "--orchestrator.max-staleness", "0", "--trainer.weights.channel", "zmq")
    run = run_rl(tmp_path, copy_model, *flags)
    assert run.exit_code == 0, run.output
    assert "serving version 4" in run.output, "the run ended before its last version was live"
    assert not list((run.path / "weights").glob("v*"))
    assert max(run.column("orchestrator", "staleness/all/max")) == 0
    assert min(run.column("trainer", "ratio/all/min")) > 1 - 1e-5
    assert max(run.column("trainer", "ratio/all/max")) < 1 + 1e-5
