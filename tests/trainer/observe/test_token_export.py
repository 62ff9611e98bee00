"""The token export: aligned, as the loss computed it, whole or absent, and without any effect on training."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.ranks import RankRun
from tests.trainer.rank_worker import CPU, NO_CLIP, micro_batches_of
from tests.trainer.scenarios import ENV_NAMES, LOSSES, SCENARIOS, SEQ_LEN, Scenario, make_manifest, ordered
from trainer.config.trainer import TokenExportConfig
from trainer.images.samples import check_image_samples, cut_sample
from trainer.losses.components import rl_inputs
from trainer.losses.factory import make_loss
from trainer.model.policy import Policy
from trainer.observe.token_export import STABLE, TokenExport, TokenRecorder, choose_rows, step_folder
from trainer.planning.pack import pack_mini_batch
from trainer.planning.plan import StepPlan, plan_step
from trainer.ranks import Ranks
from trainer.step.step import StepSettings, Watch, train_mini_batch
from transport.wire.sample import TrainingSample, VersionSpan

ALONE = Ranks(0, 1, CPU)
GIVEN = ("token_ids", "loss_mask", "reward", "advantage")
SCORES = ("inference_logprobs", "trainer_logprobs", "entropy", "log_ratio", "ratio", "mismatch_kl", "prob_delta")
COMPUTED = (*SCORES, "is_masked", "is_masked_high", "is_masked_low")
ARRAYS = GIVEN + COMPUTED


def plan_of(scenario: Scenario) -> StepPlan:
    return plan_step(make_manifest(ordered(scenario)), scenario.layout(0, 1))


def samples_of(scenario: Scenario) -> Mapping[int, TrainingSample]:
    return check_image_samples(dict(enumerate(ordered(scenario))), None, SEQ_LEN).samples


def recorder_of(scenario: Scenario, rows: list[int] | None = None) -> TokenRecorder:
    samples = samples_of(scenario)
    return TokenRecorder(1, frozenset(samples if rows is None else rows), samples)


def train(policy: Policy, scenario: Scenario, watch: Watch | None, lr: float = 0.0) -> None:
    optimizer = torch.optim.SGD(policy.parameters(), lr=lr)
    plan, samples = plan_of(scenario), samples_of(scenario)
    settings = StepSettings(ENV_NAMES, NO_CLIP, scenario.cap, plan.num_units)
    for index in plan.visits:
        micro_batches = pack_mini_batch(plan, index, 0, samples, scenario.pad_multiple)
        train_mini_batch(policy, optimizer, micro_batches, make_loss(LOSSES[scenario.loss]), settings, watch)


def export(policy: Policy, scenario: Scenario, folder: Path, **settings: object) -> list[dict]:
    """Train once, write, and read back."""
    token_export = TokenExport(TokenExportConfig(**settings), folder, ALONE, seed=0)
    recorder = token_export.recorder(plan_of(scenario), samples_of(scenario))
    train(policy, scenario, recorder)
    token_export.write(recorder)
    lines = (step_folder(folder, 1) / "rank-00000.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_arrays_are_aligned_and_computed_ones_are_null_where_nothing_is_trained(policy: Policy, tmp_path: Path) -> None:
    scenario = SCENARIOS["padded rows"]
    samples = ordered(scenario)
    records = export(policy, scenario, tmp_path)
    assert sorted(record["row"] for record in records) == list(range(len(samples)))
    for record in records:
        sample = samples[record["row"]]
        length = min(sample.num_tokens, SEQ_LEN)
        assert {len(record[name]) for name in ARRAYS} == {length}
        assert record["token_ids"] == sample.token_ids.numpy()[:length].tolist()
        assert record["loss_mask"] == sample.loss_mask.numpy()[:length].tolist()
        for name in COMPUTED:
            assert [value is not None for value in record[name]] == record["loss_mask"], name
        assert set(record["reward"]) == {sample.reward}
        assert (record["trajectory_id"], record["env_name"]) == (sample.trajectory_id, sample.env_name)


def test_derived_numbers_follow_from_the_logprobs(policy: Policy, tmp_path: Path) -> None:
    def trained(record: dict, name: str) -> np.ndarray:
        return np.array([value for value in record[name] if value is not None])

    for record in export(policy, SCENARIOS["packed"], tmp_path):
        new, old = trained(record, "trainer_logprobs"), trained(record, "inference_logprobs")
        assert trained(record, "log_ratio") == pytest.approx(new - old)
        assert trained(record, "ratio") == pytest.approx(np.exp(new - old))
        assert trained(record, "mismatch_kl") == pytest.approx(np.exp(new - old) - 1 - (new - old))
        assert trained(record, "prob_delta") == pytest.approx(np.exp(new) - np.exp(old))
        assert (trained(record, "entropy") > 0).all()


def test_record_names_the_packed_row_it_was_trained_in(policy: Policy, tmp_path: Path) -> None:
    scenario = SCENARIOS["padded rows"]
    records = {record["row"]: record for record in export(policy, scenario, tmp_path)}
    num_checked = 0
    for index, batch in enumerate(micro_batches_of(scenario, 0, 1)):
        for row in batch.sample_rows:
            record = records[row]
            end = record["position"] + len(record["token_ids"])
            assert batch.token_ids[record["position"] : end].tolist() == record["token_ids"]
            assert (record["rank"], record["micro_batch"]) == (0, index)
            assert record["micro_batch_tokens"] == sum(batch.seq_lens)
            num_checked += 1
    assert num_checked == len(records) > 1


@pytest.mark.parametrize("name", LOSSES)
def test_flags_are_those_of_the_loss_and_null_for_tokens_of_other_components(name: str, policy: Policy) -> None:
    scenario = SCENARIOS[name]
    recorder = recorder_of(scenario)
    train(policy, scenario, recorder)
    records = {record.row: record for record in recorder.records()}
    num_flags = 0
    for batch in micro_batches_of(scenario, 0, 1):
        with torch.no_grad():
            inputs = rl_inputs(batch, policy(batch))
            outputs = make_loss(LOSSES[name])(inputs)
        for segment, row in enumerate(batch.sample_rows):
            own = (inputs.segments == segment) & inputs.members
            for flag in ("is_masked", "is_masked_high", "is_masked_low"):
                exported = [value for value in getattr(records[row], flag) if value is not None]
                assert exported == getattr(outputs, flag)[own].tolist(), flag
                num_flags += len(exported)
    assert num_flags > 0


@pytest.mark.parametrize("name", LOSSES)
def test_weights_are_bit_equal_with_and_without_export(name: str, policy: Policy) -> None:
    scenario = SCENARIOS[f"{name} in mini-batches"]
    start = [parameter.detach().clone() for parameter in policy.parameters()]

    def weights_after(watch: Watch | None) -> list[Tensor]:
        with torch.no_grad():
            for parameter, value in zip(policy.parameters(), start, strict=True):
                parameter.copy_(value)
        train(policy, scenario, watch, lr=0.05)
        return [parameter.detach().clone() for parameter in policy.parameters()]

    plain, watched = weights_after(None), weights_after(recorder_of(scenario))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(plain, start, strict=True))


def test_a_number_that_is_not_finite_becomes_null(policy: Policy, tmp_path: Path) -> None:
    token_export = TokenExport(TokenExportConfig(), tmp_path, ALONE, seed=0)
    recorder = recorder_of(SCENARIOS["packed"])

    def poisoned(batch, scores, rl):  # type: ignore[no-untyped-def]
        recorder(batch, scores._replace(logprobs=torch.full_like(scores.logprobs, float("inf"))), rl)

    train(policy, SCENARIOS["packed"], poisoned)
    token_export.write(recorder)
    record = json.loads((step_folder(tmp_path, 1) / "rank-00000.jsonl").read_text().splitlines()[0])
    assert set(record["trainer_logprobs"]) == set(record["ratio"]) == set(record["mismatch_kl"]) == {None}
    assert any(value is not None for value in record["entropy"])


def test_a_sequence_is_recorded_once_however_often_it_is_trained(policy: Policy) -> None:
    recorder = recorder_of(SCENARIOS["packed"], rows=[2, 5])
    for _ in range(2):
        train(policy, SCENARIOS["packed"], recorder)
    assert sorted(record.row for record in recorder.records()) == [2, 5]


def test_only_as_many_sequences_as_allowed_are_recorded(policy: Policy, tmp_path: Path) -> None:
    assert len(export(policy, SCENARIOS["packed"], tmp_path, max_sequences_per_step=5)) == 5


def test_rows_are_chosen_by_seed_and_step_at_the_rate_and_below_the_limit() -> None:
    assert choose_rows(1000, (0, 1), rate=0.1, limit=1000) == choose_rows(1000, (0, 1), rate=0.1, limit=1000)
    assert choose_rows(1000, (0, 1), 0.1, 1000) != choose_rows(1000, (0, 2), 0.1, 1000)
    assert 60 < len(choose_rows(1000, (0, 1), rate=0.1, limit=1000)) < 140
    assert len(choose_rows(1000, (0, 1), rate=0.1, limit=7)) == 7
    assert choose_rows(5, (0, 1), rate=1.0, limit=64) == frozenset(range(5))


def test_the_marker_comes_last_and_no_temporary_file_stays(policy: Policy, tmp_path: Path) -> None:
    export(policy, SCENARIOS["packed"], tmp_path / "deep" / "er")
    assert {path.name for path in step_folder(tmp_path / "deep" / "er", 1).iterdir()} == {"rank-00000.jsonl", STABLE}


def test_a_step_that_is_trained_again_by_fewer_ranks_leaves_nothing_of_the_first_time(
    policy: Policy, tmp_path: Path
) -> None:
    folder = step_folder(tmp_path, 1)
    folder.mkdir()
    for name in ("rank-00000.jsonl", "rank-00001.jsonl", STABLE):
        (folder / name).write_text("of before the crash")
    export(policy, SCENARIOS["packed"], tmp_path)
    assert {path.name for path in folder.iterdir()} == {"rank-00000.jsonl", STABLE}


def test_a_step_that_cannot_be_written_again_is_not_stable_any_more(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 1)
    (folder / "rank-00000.jsonl" / "in the way").mkdir(parents=True)
    (folder / STABLE).write_text("")
    TokenExport(TokenExportConfig(), tmp_path, ALONE, seed=0).write(TokenRecorder(1, frozenset(), {}))
    assert not (folder / STABLE).exists()


def test_the_versions_of_a_record_are_those_of_its_tokens(policy: Policy) -> None:
    scenario = SCENARIOS["packed"]
    (row,) = [row for row, sample in enumerate(ordered(scenario)) if sample.num_tokens == 60]
    spans = (VersionSpan(3, 30, 40), VersionSpan(4, 40, 55), VersionSpan(5, 55, 60))
    sample = msgspec.structs.replace(ordered(scenario)[row], versions=spans)
    recorder = TokenRecorder(1, frozenset([row]), {**samples_of(scenario), row: cut_sample(sample, None, SEQ_LEN)})
    train(policy, scenario, recorder)
    (record,) = recorder.records()
    assert record.versions == (VersionSpan(3, 30, 40), VersionSpan(4, 40, SEQ_LEN))


def test_a_disk_that_refuses_costs_the_records_and_one_warning(tmp_path: Path, warnings_seen: list[str]) -> None:
    folder = tmp_path / "not_a_folder"
    folder.write_text("")
    token_export = TokenExport(TokenExportConfig(), folder, ALONE, seed=0)
    for step in (1, 2):
        token_export.write(TokenRecorder(step, frozenset(), {}))
    assert len(warnings_seen) == 1
    assert "its records are lost" in warnings_seen[0]


def test_a_rank_that_does_not_write_leaves_no_file_and_spoils_nothing(tmp_path: Path) -> None:
    token_export = TokenExport(TokenExportConfig(), tmp_path, ALONE, seed=0, writes=False)
    token_export.write(TokenRecorder(3, frozenset(), {}))
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.integration
def test_each_rank_writes_its_own_file_and_together_they_hold_each_chosen_row_once(rank_run: RankRun) -> None:
    folder = step_folder(rank_run.out / "token_export", 1)
    names = {f"rank-{rank:05d}.jsonl" for rank in range(rank_run.world_size)}
    assert {path.name for path in folder.iterdir()} == names | {STABLE}
    records = [json.loads(line) for name in names for line in (folder / name).read_text().splitlines()]
    chosen = choose_rows(len(ordered(SCENARIOS["packed"])), (0, 1), rate=1.0, limit=9)
    assert sorted(record["row"] for record in records) == sorted(chosen)
