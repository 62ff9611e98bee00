"""Rollouts to frames and back. A decoded rollout's arrays are views of the frame it came in."""

from collections.abc import Sequence

import msgspec

from orchestrator.envs.workers.messages import BranchFrame, FailureFrame, RolloutFrame, plain_json
from orchestrator.errors import WorkerLinkError
from orchestrator.rollout import Branch, Failure, Rollout
from transport.tensor import Array, DType, EncodedTensor

ResultFrame = RolloutFrame | FailureFrame


def to_frames(results: Sequence[Rollout | Failure]) -> tuple[ResultFrame, ...]:
    """What travels."""
    return tuple(_to_frame(result) for result in results)


def from_frames(frames: Sequence[ResultFrame]) -> list[Rollout | Failure]:
    """What arrived. Raises `WorkerLinkError` if a branch's arrays are not what they should be."""
    return [_from_frame(frame) for frame in frames]


def _to_frame(result: Rollout | Failure) -> ResultFrame:
    if isinstance(result, Failure):
        return FailureFrame(reason=result.reason, message=result.message)
    return RolloutFrame(
        env_name=result.env_name,
        example_id=result.example_id,
        reward=result.reward,
        branches=tuple(_branch_frame(branch) for branch in result.branches),
        temperature=result.temperature,
        is_truncated=result.is_truncated,
        metrics=result.metrics,
        messages=plain_json(result.messages),
        duration_s=result.duration_s,
        sampling_args=dict(result.sampling_args),
        columns={name: bytes(value) for name, value in result.columns.items()},
    )


def _from_frame(frame: ResultFrame) -> Rollout | Failure:
    if isinstance(frame, FailureFrame):
        return Failure(frame.reason, frame.message)
    return Rollout(
        env_name=frame.env_name,
        example_id=frame.example_id,
        reward=frame.reward,
        branches=tuple(_branch(branch) for branch in frame.branches),
        temperature=frame.temperature,
        is_truncated=frame.is_truncated,
        metrics=frame.metrics,
        messages=tuple(msgspec.json.decode(frame.messages, type=list[dict[str, object]])),
        duration_s=frame.duration_s,
        sampling_args=frame.sampling_args,
        columns={name: msgspec.Raw(value) for name, value in frame.columns.items()},
    )


def _branch_frame(branch: Branch) -> BranchFrame:
    return BranchFrame(
        token_ids=EncodedTensor.of(branch.token_ids),
        sampled=EncodedTensor.of(branch.sampled),
        logprobs=EncodedTensor.of(branch.logprobs),
        versions=branch.versions,
        observed=None if branch.observed is None else EncodedTensor.of(branch.observed),
        ref_logprobs=None if branch.ref_logprobs is None else EncodedTensor.of(branch.ref_logprobs),
    )


def _branch(frame: BranchFrame) -> Branch:
    num_tokens = frame.token_ids.shape[0] if len(frame.token_ids.shape) == 1 else -1
    return Branch(
        token_ids=_vector(frame.token_ids, "int32", num_tokens),
        sampled=_vector(frame.sampled, "bool", num_tokens),
        logprobs=_vector(frame.logprobs, "float32", num_tokens),
        versions=frame.versions,
        observed=None if frame.observed is None else _vector(frame.observed, "bool", num_tokens),
        ref_logprobs=None if frame.ref_logprobs is None else _vector(frame.ref_logprobs, "float32", num_tokens),
    )


def _vector(tensor: EncodedTensor, dtype: DType, num_tokens: int) -> Array:
    if not tensor.is_vector(dtype, num_tokens):
        raise WorkerLinkError(f"a branch of {num_tokens} tokens has {tensor.dtype}{list(tensor.shape)} for a {dtype}")
    return tensor.numpy()
