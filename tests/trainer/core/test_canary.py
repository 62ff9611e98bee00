"""The canary is what the weights say: the same on any number of ranks, and another after a change."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.ranks import RankRun
from trainer.checks.canary import make_canary
from trainer.model.policy import Policy


def test_canary_is_the_likeliest_tokens_log_probability_after_each_prefix(policy: Policy, model_path: Path) -> None:
    canary = make_canary(policy)
    canary.check()
    reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    prompt = torch.from_numpy(canary.token_ids.numpy().astype(np.int64))
    for length, logprob in zip(canary.lengths.numpy().tolist(), canary.logprobs.numpy().tolist(), strict=True):
        with torch.no_grad():
            logits = reference(input_ids=prompt[None, :length], use_cache=False).logits[0, -1]
        assert logprob == pytest.approx(float(torch.log_softmax(logits, dim=-1).max()), abs=1e-4)


def test_other_weights_have_another_canary(policy: Policy) -> None:
    before = make_canary(policy)
    assert make_canary(policy) == before
    with torch.no_grad():
        policy.causal_lm.get_output_embeddings().weight.mul_(1.5)
    assert np.abs(make_canary(policy).logprobs.numpy() - before.logprobs.numpy()).max() > 1e-3


@pytest.mark.integration
def test_canary_does_not_depend_on_the_number_of_ranks(rank_run: RankRun, policy: Policy) -> None:
    alone = make_canary(policy).logprobs.numpy().tolist()
    for rank in range(rank_run.world_size):
        assert rank_run.results(rank)["canary"]["logprobs"] == pytest.approx(alone, abs=1e-4)
