"""What the policy says to a fixed prompt: shipped with every publish, so that engines can be held to it."""

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from trainer.batches.fake import probe_sample
from trainer.model.fsdp import reshard
from trainer.model.policy import Policy
from trainer.planning.pack import pack
from transport.wire.sample import EncodedTensor
from transport.wire.weights import Canary

NUM_TOKENS = 8
LENGTHS = (2, 4, 6, 8)
"""Short: an engine's longest prompt may be short, too."""


@torch.no_grad()
def make_canary(policy: Policy) -> Canary:
    """The canary of the weights as they are now. A collective call: every rank makes it, and all get the same."""
    prompt = _prompt(policy.causal_lm.config.get_text_config().vocab_size)
    sample = probe_sample(prompt, np.isin(np.arange(len(prompt)), LENGTHS))  # token n is predicted from the n before it
    batch = pack([sample], [0], [0], policy.row_multiple, images=policy.image_spec)
    states = policy(batch.to(next(policy.parameters()).device)).states
    assert states is not None, "a policy returns the states that predict its tokens"
    head = policy.causal_lm.get_output_embeddings().weight  # whole after a forward pass, unless it was freed
    whole = head.full_tensor() if isinstance(head, DTensor) else head
    logprobs = torch.log_softmax((states @ whole.to(states.dtype).T).float(), dim=-1).amax(dim=-1)
    reshard(policy)
    return Canary(
        token_ids=EncodedTensor.of(prompt[:NUM_TOKENS]),
        lengths=EncodedTensor.of(np.array(LENGTHS, np.int32)),
        logprobs=EncodedTensor.of(logprobs.cpu().numpy()),
    )


def _prompt(vocab_size: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    """Fixed ids of the lower half of the vocabulary, where no image or padding token stands; one more than is sent."""
    return np.random.default_rng(0).integers(0, max(2, vocab_size // 2), NUM_TOKENS + 1).astype(np.int32)
