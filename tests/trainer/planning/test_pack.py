"""Samples to micro batches: columns, cutting, padding, dummies, and refusal of samples that were not planned."""

import numpy as np
import pytest
import torch

from tests.trainer.scenarios import ENV_NAMES, make_manifest, make_sample, make_samples
from trainer.errors import BatchMismatch
from trainer.images.samples import check_image_samples, cut_sample
from trainer.planning.layout import Layout
from trainer.planning.pack import pack, pack_mini_batch
from trainer.planning.plan import StepPlan, plan_step
from transport.wire.sample import EncodedTensor, TrainingSample


def floats(*values: float) -> EncodedTensor:
    return EncodedTensor.of(np.array(values, dtype=np.float32))


def two_samples() -> list[TrainingSample]:
    """A prompt token and two trained ones; a prompt of two, one trained, one more prompt token."""
    rng = np.random.default_rng(0)
    return [
        make_sample(
            0,
            3,
            rng,
            token_ids=EncodedTensor.of(np.array([10, 11, 12], dtype=np.int32)),
            loss_mask=EncodedTensor.of(np.array([False, True, True])),
            logprobs=floats(0, -1, -2),
            advantages=0.5,
            temperature=0.7,
        ),
        make_sample(
            1,
            4,
            rng,
            token_ids=EncodedTensor.of(np.array([20, 21, 22, 23], dtype=np.int32)),
            loss_mask=EncodedTensor.of(np.array([False, False, True, False])),
            logprobs=floats(0, 0, -3, 0),
            advantages=floats(9, 9, -2, 9),
            temperature=1.0,
        ),
    ]


def test_samples_are_laid_end_to_end() -> None:
    batch = pack(two_samples(), [0, 1], [5, 6])
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 21, 22, 23]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert (batch.seq_lens, batch.sample_count, batch.sample_rows) == ((3, 4), 2, (5, 6))
    assert batch.env_ids.tolist() == [0, 1]
    assert (batch.num_tokens, batch.num_loss_tokens, batch.is_dummy) == (7, 3, False)


def test_loss_tokens_hold_what_belongs_to_each_trained_token() -> None:
    tokens = pack(two_samples(), [0, 1], [0, 1]).loss_tokens
    assert tokens.index.tolist() == [1, 2, 5]
    assert tokens.labels.tolist() == [11, 12, 22]
    assert tokens.segments.tolist() == [0, 0, 1]
    assert tokens.logprobs.tolist() == [-1, -2, -3]
    assert tokens.advantages.tolist() == [0.5, 0.5, -2]
    assert tokens.temperatures.tolist() == pytest.approx([0.7, 0.7, 1.0])


def test_what_predicts_a_trained_token_is_in_the_same_segment() -> None:
    batch = pack(make_samples([5, 2, 9, 3]), [0] * 4, range(4))
    assert (batch.position_ids[batch.loss_tokens.index] > 0).all()


def test_a_long_sample_is_cut_at_its_end_in_every_column() -> None:
    sample = make_samples([20])[0]
    batch = pack([cut_sample(sample, None, 12)], [0], [0])
    assert batch.seq_lens == (12,)
    assert batch.token_ids.tolist() == sample.token_ids.numpy()[:12].tolist()
    assert batch.loss_tokens.index.tolist() == [10, 11]
    assert batch.loss_tokens.logprobs.tolist() == sample.logprobs.numpy()[10:12].tolist()


def test_padding_is_a_segment_of_its_own_and_counts_for_nothing() -> None:
    plain = pack(two_samples(), [0, 1], [0, 1])
    padded = pack(two_samples(), [0, 1], [0, 1], pad_multiple=5)
    assert padded.seq_lens == (3, 4, 3)
    assert padded.position_ids.tolist()[-3:] == [0, 1, 2]
    assert (padded.sample_count, padded.num_tokens, padded.num_loss_tokens) == (2, 7, 3)
    assert torch.equal(padded.loss_tokens.index, plain.loss_tokens.index)


def test_a_dummy_is_one_token_that_is_not_trained() -> None:
    dummy = pack([], [], [])
    assert dummy.is_dummy
    assert (dummy.seq_lens, dummy.sample_count, dummy.num_tokens, dummy.num_loss_tokens) == ((1,), 0, 0, 0)
    assert dummy.loss_tokens.rl_weights is None


def test_absent_weights_mean_rl_on_every_trained_token() -> None:
    tokens = pack(two_samples(), [0, 1], [0, 1]).loss_tokens
    assert tokens.rl_weights is not None
    assert tokens.rl_weights.tolist() == [1, 1, 1]
    assert tokens.ce_weights is tokens.ref_kl_weights is tokens.ref_logprobs is None


def test_a_weight_outside_the_loss_mask_makes_no_member() -> None:
    sample = make_sample(0, 4, np.random.default_rng(0), ce_weights=floats(1, 1, 0, 0))
    assert pack([sample], [0], [0]).loss_tokens.ce_weights is None


def test_weights_of_one_sample_do_not_reach_another() -> None:
    rng = np.random.default_rng(0)
    supervised = make_sample(0, 4, rng, rl_weights=floats(0, 0, 0, 0), ce_weights=floats(0, 0, 2, 3))
    tokens = pack([supervised, make_sample(1, 4, rng)], [0, 0], [0, 1]).loss_tokens
    assert tokens.rl_weights is not None
    assert tokens.ce_weights is not None
    assert tokens.rl_weights.tolist() == [0, 0, 1, 1]
    assert tokens.ce_weights.tolist() == [2, 3, 0, 0]


def test_ref_kl_without_reference_logprobs_is_refused() -> None:
    sample = make_sample(0, 4, np.random.default_rng(0), ref_kl_weights=floats(0, 0, 1, 1))
    with pytest.raises(BatchMismatch, match="no ref_logprobs"):
        pack([sample], [0], [0])


def test_the_advantage_of_a_sample_is_the_mean_over_its_trained_tokens() -> None:
    assert pack(two_samples(), [0, 1], [0, 1]).advantages.tolist() == [0.5, -2]
    assert pack([cut_sample(two_samples()[1], None, 2)], [1], [1]).advantages.tolist() == [0]


def plan_of(samples: list[TrainingSample], world_size: int) -> StepPlan:
    return plan_step(make_manifest(samples), Layout(0, world_size, micro_batch_tokens=32, seq_len=32))


def test_every_rank_packs_its_own_rows_and_all_ranks_pack_the_batch() -> None:
    samples = make_samples([9, 20, 31, 4, 12, 40, 7])
    plan = plan_of(samples, 3)
    by_row = check_image_samples(dict(enumerate(samples)), None, plan.seq_len).samples
    packed = [pack_mini_batch(plan, 0, rank, by_row) for rank in range(3)]
    assert len({len(micro_batches) for micro_batches in packed}) == 1
    rows = sorted(row for micro_batches in packed for batch in micro_batches for row in batch.sample_rows)
    assert rows == list(range(7))
    for batch in packed[0]:
        assert [ENV_NAMES[env] for env in batch.env_ids.tolist()] == [
            samples[row].env_name for row in batch.sample_rows
        ]


def test_a_sample_that_was_not_fetched_is_named() -> None:
    samples = make_samples([9, 20])
    with pytest.raises(BatchMismatch, match="row 1 of batch 1 was planned but not fetched"):
        pack_mini_batch(plan_of(samples, 1), 0, 0, {0: samples[0]})


def test_a_sample_that_its_manifest_does_not_describe_is_refused() -> None:
    samples = make_samples([9, 20])
    with pytest.raises(BatchMismatch, match="row 0 of batch 1 is reverse/0/0#1"):
        pack_mini_batch(plan_of(samples, 1), 0, 0, {0: samples[1], 1: samples[0]})
