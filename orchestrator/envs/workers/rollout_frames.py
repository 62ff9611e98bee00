"""Rollouts to frames and back. A decoded rollout's arrays are views of the frame it came in, unless the frame has
pictures: then they are copies, so that a picture that another rollout has already is let go with the frame."""

from collections.abc import Mapping, Sequence

import msgspec
import xxhash

from orchestrator.envs.workers.messages import Ask, BranchFrame, FailureFrame, RolloutFrame, plain_json
from orchestrator.errors import WorkerLinkError
from orchestrator.images.pictures import Pictures
from orchestrator.images.shelf import PictureShelf
from orchestrator.rollout import Branch, Failure, Rollout
from transport.errors import CodecError
from transport.tensor import Array, DType, EncodedTensor

ResultFrame = RolloutFrame | FailureFrame


def to_frames(results: Sequence[Rollout | Failure]) -> tuple[ResultFrame, ...]:
    """What travels."""
    return tuple(_to_frame(result) for result in results)


def from_frames(frames: Sequence[ResultFrame], shelf: PictureShelf) -> list[Rollout | Failure]:
    """What arrived; equal pictures are shared. Raises `WorkerLinkError` if a branch's arrays are not what they should
    be."""
    return [_from_frame(frame, shelf) for frame in frames]


def detached(ask: Ask, shelf: PictureShelf) -> tuple[Ask, Pictures | None]:
    """`ask` without the frame it came in, and the pictures in it, shared with all who have the same."""
    request = ask.request
    if not request.mm_kwargs:
        return ask, None
    digest = xxhash.xxh3_128()
    for name in sorted(request.mm_kwargs):
        digest.update(request.mm_kwargs[name].data)
    pictures = shelf.hold(_pictures((digest.hexdigest(),), request.mm_kwargs))
    types = request.mm_token_type_ids
    copied = msgspec.structs.replace(
        request,
        token_ids=_copied(request.token_ids),
        mm_kwargs=pictures.mm_kwargs,
        mm_token_type_ids=None if types is None else _copied(types),
    )
    return msgspec.structs.replace(ask, request=copied), pictures


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


def _from_frame(frame: ResultFrame, shelf: PictureShelf) -> Rollout | Failure:
    if isinstance(frame, FailureFrame):
        return Failure(frame.reason, frame.message)
    return Rollout(
        env_name=frame.env_name,
        example_id=frame.example_id,
        reward=frame.reward,
        branches=tuple(_branch(branch, shelf) for branch in frame.branches),
        temperature=frame.temperature,
        is_truncated=frame.is_truncated,
        metrics=frame.metrics,
        messages=_messages(frame.messages),
        duration_s=frame.duration_s,
        sampling_args=frame.sampling_args,
        columns={name: msgspec.Raw(value) for name, value in frame.columns.items()},
    )


def _messages(data: bytes) -> tuple[dict[str, object], ...]:
    try:
        return msgspec.json.decode(data, type=tuple[dict[str, object], ...])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WorkerLinkError(f"the messages of a rollout do not decode: {error}") from error


def _branch_frame(branch: Branch) -> BranchFrame:
    return BranchFrame(
        token_ids=EncodedTensor.of(branch.token_ids),
        sampled=EncodedTensor.of(branch.sampled),
        logprobs=EncodedTensor.of(branch.logprobs),
        versions=branch.versions,
        observed=None if branch.observed is None else EncodedTensor.of(branch.observed),
        ref_logprobs=None if branch.ref_logprobs is None else EncodedTensor.of(branch.ref_logprobs),
        picture_digests=() if branch.pictures is None else branch.pictures.digests,
        mm_kwargs={} if branch.pictures is None else branch.pictures.mm_kwargs,
        token_types=None if branch.token_types is None else EncodedTensor.of(branch.token_types),
    )


def _branch(frame: BranchFrame, shelf: PictureShelf) -> Branch:
    num_tokens = frame.token_ids.shape[0] if len(frame.token_ids.shape) == 1 else -1

    def vector(tensor: EncodedTensor, dtype: DType) -> Array:
        array = _vector(tensor, dtype, num_tokens)
        return array.copy() if frame.mm_kwargs else array

    return Branch(
        token_ids=vector(frame.token_ids, "int32"),
        sampled=vector(frame.sampled, "bool"),
        logprobs=vector(frame.logprobs, "float32"),
        versions=frame.versions,
        observed=None if frame.observed is None else vector(frame.observed, "bool"),
        ref_logprobs=None if frame.ref_logprobs is None else vector(frame.ref_logprobs, "float32"),
        pictures=shelf.hold(_pictures(frame.picture_digests, frame.mm_kwargs)) if frame.mm_kwargs else None,
        token_types=None if frame.token_types is None else vector(frame.token_types, "uint8"),
    )


def _pictures(digests: tuple[str, ...], mm_kwargs: Mapping[str, EncodedTensor]) -> Pictures:
    try:
        for tensor in mm_kwargs.values():
            tensor.check()
        return Pictures(digests, **mm_kwargs)
    except (CodecError, TypeError) as error:
        raise WorkerLinkError(f"the pictures of a message do not make sense: {error}") from error


def _copied(tensor: EncodedTensor) -> EncodedTensor:
    try:
        tensor.check()
    except CodecError as error:
        raise WorkerLinkError(f"the tokens of a message do not make sense: {error}") from error
    return EncodedTensor.of(tensor.numpy().copy())


def _vector(tensor: EncodedTensor, dtype: DType, num_tokens: int) -> Array:
    if not tensor.is_vector(dtype, num_tokens):
        raise WorkerLinkError(f"a branch of {num_tokens} tokens has {tensor.dtype}{list(tensor.shape)} for a {dtype}")
    return tensor.numpy()
