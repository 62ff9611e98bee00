import msgspec
import numpy as np
import pytest

from chat.branch import Branch
from orchestrator.batches.samples import to_samples
from orchestrator.config.algorithm import OpdAlgorithmConfig, RlAlgorithmConfig, SftAlgorithmConfig
from orchestrator.values.rollout import Rollout
from orchestrator.values.token_weights import PLAIN_RL, TokenWeights, token_weights
from transport.wire.codec import decode_sample, encode
from transport.wire.sample import TrainingSample, VersionSpan


def make_branch(sampled: list[bool], version: int = 7) -> Branch:
    mask = np.array(sampled)
    spans = tuple(VersionSpan(version, int(i), int(i) + 1) for i in np.flatnonzero(mask))
    logprobs = np.where(mask, -0.25, 0).astype(np.float32)
    return Branch(np.arange(len(sampled), dtype=np.int32), mask, logprobs, spans)


def samples_of(*branches: Branch, weights: TokenWeights = PLAIN_RL) -> list[TrainingSample]:
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
    return to_samples(
        rollout, advantage=-1.5, run_id="run", group_id="env/ex/0", trajectory_id="env/ex/0#2", weights=weights
    )


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


def stream(sample: TrainingSample, name: str) -> list[float] | None:
    tensor = getattr(sample, name)
    return None if tensor is None else tensor.numpy().tolist()


def make_two_turns() -> Branch:
    """Two prompt tokens, a reply of two, an answer of two by the environment, a reply of one."""
    branch = make_branch([False, False, True, True, False, False, True])
    return msgspec.structs.replace(
        branch,
        observed=np.array([False, False, False, False, True, True, False]),
        ref_logprobs=-np.arange(7, dtype=np.float32),
    )


def test_plain_reinforcement_has_no_weight_streams() -> None:
    (sample,) = samples_of(make_two_turns())
    names = ("rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs")
    assert [stream(sample, name) for name in names] == [None] * 4
    assert sample.num_loss_tokens == 3


def test_imitation_is_cross_entropy_at_temperature_1_without_behaviour_or_advantage() -> None:
    weights = token_weights(SftAlgorithmConfig(teacher="big", weight=0.5))
    (sample,) = samples_of(make_two_turns(), weights=weights)
    sample.check()
    assert stream(sample, "rl_weights") == [0.0] * 7
    assert stream(sample, "ce_weights") == [0, 0, 0.5, 0.5, 0, 0, 0.5]
    assert stream(sample, "ref_kl_weights") is None
    assert stream(sample, "logprobs") == [0.0] * 7
    assert sample.temperature == 1.0


def test_distillation_brings_the_teachers_log_probabilities_of_sampled_tokens() -> None:
    (sample,) = samples_of(make_two_turns(), weights=token_weights(OpdAlgorithmConfig(teacher="big", weight=2.0)))
    sample.check()
    assert stream(sample, "ref_kl_weights") == [0, 0, 2, 2, 0, 0, 2]
    assert stream(sample, "ref_logprobs") == [0, 0, -2, -3, 0, 0, -6]
    assert stream(sample, "rl_weights") == [0.0] * 7
    assert stream(sample, "ce_weights") is None
    assert stream(sample, "logprobs") == [0, 0, -0.25, -0.25, 0, 0, -0.25], "the importance weight needs them"
    assert sample.temperature == 0.6


def test_distillation_may_keep_the_reward() -> None:
    weights = token_weights(OpdAlgorithmConfig(teacher="big", rl_weight=0.25))
    (sample,) = samples_of(make_two_turns(), weights=weights)
    assert stream(sample, "rl_weights") == [0, 0, 0.25, 0.25, 0, 0, 0.25]
    assert sample.advantages == -1.5


def test_observation_training_adds_what_the_environment_wrote_between_turns() -> None:
    (sample,) = samples_of(make_two_turns(), weights=token_weights(RlAlgorithmConfig(observation_weight=0.1)))
    sample.check()
    assert sample.loss_mask.numpy().tolist() == [False, False, True, True, True, True, True]
    assert stream(sample, "rl_weights") == [0, 0, 1, 1, 0, 0, 1]
    assert stream(sample, "ce_weights") == pytest.approx([0, 0, 0, 0, 0.1, 0.1, 0])


def test_observation_training_of_a_single_turn_is_plain() -> None:
    (sample,) = samples_of(make_branch([False, True]), weights=TokenWeights(observation=0.1))
    assert (stream(sample, "rl_weights"), stream(sample, "ce_weights")) == (None, None)


def test_samples_with_weights_survive_the_wire() -> None:
    weights = TokenWeights(rl=0.5, ce=0.25, ref_kl=2.0, observation=0.1)
    (sample,) = samples_of(make_two_turns(), weights=weights)
    assert decode_sample(encode(sample)) == sample
