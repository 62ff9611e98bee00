"""Engine replies and checks on branches that several tests share."""

from collections.abc import Sequence

import numpy as np

from chat.trajectory import Branch
from transport.wire.generation import FinishReason, GenerateReply
from transport.wire.sample import EncodedTensor, VersionSpan


def make_reply(
    token_ids: Sequence[int],
    *,
    request_id: str = "r",
    finish_reason: FinishReason = "stop",
    versions: tuple[VersionSpan, ...] | None = None,
) -> GenerateReply:
    """A sound reply; log probabilities are -0.5, -1.5, ..."""
    count = len(token_ids)
    return GenerateReply(
        request_id=request_id,
        token_ids=EncodedTensor.of(np.array(token_ids, dtype=np.int32)),
        logprobs=EncodedTensor.of(-0.5 - np.arange(count, dtype=np.float32)),
        finish_reason=finish_reason,
        versions=(VersionSpan(3, 0, count),) if versions is None else versions,
    )


def sampled_tokens(branches: Sequence[Branch]) -> list[int]:
    """All tokens that the branches would train, in order."""
    return [int(token) for branch in branches for token in branch.token_ids[branch.sampled]]


def check_branch(branch: Branch) -> None:
    """What holds for every branch: equal lengths, spans over exactly the sampled tokens, zeros elsewhere."""
    length = len(branch.token_ids)
    assert len(branch.sampled) == len(branch.logprobs) == length
    assert (branch.token_ids.dtype, branch.sampled.dtype, branch.logprobs.dtype) == (np.int32, np.bool_, np.float32)
    covered = np.zeros(length, dtype=np.bool_)
    for span in branch.versions:
        assert not covered[span.start : span.end].any()
        covered[span.start : span.end] = True
    assert (covered == branch.sampled).all()
    assert (branch.logprobs[~branch.sampled] == 0).all()
    assert branch.observed is not None
    assert (len(branch.observed), branch.observed.dtype) == (length, np.bool_)
    assert not (branch.observed & branch.sampled).any()
    assert not branch.observed[0], "the first token is the task's"


def observed_tokens(branches: Sequence[Branch]) -> list[int]:
    """All tokens that the environment wrote between turns, in order."""
    return [int(token) for branch in branches for token in branch.token_ids[branch.observed]]
