import numpy as np
import pytest

from orchestrator.rollout import Branch, Rollout
from orchestrator.samples import to_samples
from transport.codec import decode_sample, encode
from transport.sample import TrainingSample, VersionSpan


def make_branch(sampled: list[bool], version: int = 7) -> Branch:
    mask = np.array(sampled)
    spans = tuple(VersionSpan(version, int(i), int(i) + 1) for i in np.flatnonzero(mask))
    logprobs = np.where(mask, -0.25, 0).astype(np.float32)
    return Branch(np.arange(len(sampled), dtype=np.int32), mask, logprobs, spans)


def samples_of(*branches: Branch) -> list[TrainingSample]:
    rollout = Rollout(
        env_name="env",
        example_id="ex",
        reward=0.75,
        branches=branches,
        temperature=0.6,
        is_truncated=False,
        metrics={},
        messages=(),
        duration_s=0.1,
    )
    return to_samples(rollout, advantage=-1.5, run_id="run", group_id="env/ex/0", trajectory_id="env/ex/0#2")


def test_sample_trains_exactly_the_sampled_tokens() -> None:
    (sample,) = samples_of(make_branch([False, False, True, True]))
    sample.check()
    assert sample.loss_mask.numpy().tolist() == [False, False, True, True]
    assert sample.logprobs.numpy().tolist() == [0, 0, -0.25, -0.25]
    assert sample.token_ids.numpy().tolist() == [0, 1, 2, 3]
    assert sample.num_loss_tokens == 2
    assert (sample.advantages, sample.reward, sample.temperature) == (-1.5, 0.75, 0.6)
    assert sample.oldest_version == 7
    assert (sample.run_id, sample.env_name, sample.example_id) == ("run", "env", "ex")
    assert (sample.group_id, sample.trajectory_id) == ("env/ex/0", "env/ex/0#2")


def test_each_branch_is_a_step_of_the_same_trajectory() -> None:
    samples = samples_of(make_branch([False, True], 1), make_branch([False, True, True], 2))
    assert [sample.step_index for sample in samples] == [0, 1]
    assert [sample.oldest_version for sample in samples] == [1, 2]
    assert len({sample.trajectory_id for sample in samples}) == 1


def test_position_zero_is_never_trained() -> None:
    (sample,) = samples_of(make_branch([True, True]))
    assert sample.loss_mask.numpy().tolist() == [False, True]


def test_branch_that_trains_nothing_gives_no_sample() -> None:
    samples = samples_of(make_branch([False, False]), make_branch([True]), make_branch([False, True]))
    assert [sample.step_index for sample in samples] == [0]


def test_loss_mask_does_not_alias_the_branch() -> None:
    branch = make_branch([True, True])
    samples_of(branch)
    assert branch.sampled.tolist() == [True, True]


@pytest.mark.parametrize("length", [2, 5, 1000])
def test_sample_survives_the_wire(length: int) -> None:
    (sample,) = samples_of(make_branch([False, *[True] * (length - 1)]))
    received = decode_sample(encode(sample))
    assert received.token_ids.numpy().tolist() == sample.token_ids.numpy().tolist()
    assert received.versions == sample.versions
