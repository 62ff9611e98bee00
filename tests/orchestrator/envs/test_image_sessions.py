"""Images over several turns: none is lost, none is expanded twice, and samples carry what the model saw."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from chat.errors import ImageError
from chat.tokenizer import Tokenizer
from chat.trajectory import Branch
from orchestrator.batches.assembler import to_samples
from orchestrator.engines.protocol import InvalidResponse
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.session import SamplingPlan, Session
from orchestrator.values.rollout import Rollout
from tests.chat.drawn import data_url, draw, user, vision_folder
from transport.wire.codec import decode_sample, encode_sample
from transport.wire.generation import GenerateRequest

A, B = data_url(draw(1)), data_url(draw(2, 32, 16))
LARGE = data_url(draw(3, 256, 256))
NUM_A, NUM_B = 4, 8
"""Tokens of the images: 16 and 32 patches, four to a token."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_folder(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


class Conversation:
    """A session that remembers what the engine was asked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.asked: list[GenerateRequest] = []
        self.chat: list[dict[str, object]] = []
        self._reply = np.append(tokenizer.encode("ok"), min(tokenizer.eos_ids)).astype(np.int32)
        engine = ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids), script=self._script)
        self.session = Session(engine, tokenizer, SamplingPlan("t", seed=0, temperature=1.0, max_tokens=8))

    async def say(self, message: dict[str, object]) -> GenerateRequest:
        self.chat.append(message)
        completion = await self.session.complete(self.chat)
        self.chat.append({"role": "assistant", "content": completion.text})
        return self.asked[-1]

    def _script(self, request: GenerateRequest) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        self.asked.append(request)
        return self._reply


def image_id(tokenizer: Tokenizer) -> int:
    return int(tokenizer.encode("<|image_pad|>")[0])


def grids(request: GenerateRequest) -> list[list[int]]:
    rows: list[list[int]] = request.mm_kwargs["image_grid_thw"].numpy().tolist()
    return rows


async def test_prompt_is_expanded_as_hugging_face_does(tokenizer: Tokenizer, folder: Path) -> None:
    request = await Conversation(tokenizer).say(user("look:", A, "and", B, "what?"))
    theirs = AutoTokenizer.from_pretrained(folder)
    pad = "<|image_pad|>"
    text = (
        f"<|im_start|>user\nlook:<|vision_start|>{pad * NUM_A}<|vision_end|>and<|vision_start|>{pad * NUM_B}"
        "<|vision_end|>what?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = request.token_ids.numpy()
    assert ids.tolist() == theirs.encode(text, add_special_tokens=False)
    assert request.mm_token_type_ids is not None
    assert request.mm_token_type_ids.numpy().tolist() == (ids == image_id(tokenizer)).astype(int).tolist()
    assert grids(request) == [[1, 4, 4], [1, 4, 8]]


async def test_later_turns_keep_earlier_images_and_add_their_own(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer)
    first = await conversation.say(user(A, "what?"))
    second = await conversation.say(user(B, "and this?"))
    third = await conversation.say(user("and the first?"))
    assert [grids(request) for request in (first, second, third)] == [
        [[1, 4, 4]],
        [[1, 4, 4], [1, 4, 8]],
        [[1, 4, 4], [1, 4, 8]],
    ]
    for before, after in ((first, second), (second, third)):
        length = before.token_ids.shape[0]
        assert after.token_ids.numpy()[:length].tolist() == before.token_ids.numpy().tolist()
        counts = [np.count_nonzero(each.token_ids.numpy() == image_id(tokenizer)) for each in (before, after)]
        assert counts[0] <= counts[1] <= NUM_A + NUM_B, "no image is expanded twice"
    start = first.mm_kwargs["pixel_values"].numpy()
    assert second.mm_kwargs["pixel_values"].numpy()[: len(start)].tobytes() == start.tobytes()


async def test_sample_carries_images_and_modalities(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer)
    await conversation.say(user(A, "what?"))
    request = await conversation.say(user(B, "and this?"))
    (branch,) = conversation.session.trajectory.branches()
    sample = decode_sample(encode_sample(sample_of(branch)))
    assert sample.mm_kwargs.keys() == {"pixel_values", "image_grid_thw"}
    for name, tensor in sample.mm_kwargs.items():
        assert (tensor.dtype, tensor.shape) == (request.mm_kwargs[name].dtype, request.mm_kwargs[name].shape)
        assert bytes(tensor.data) == bytes(request.mm_kwargs[name].data)
    assert sample.mm_token_type_ids is not None
    types = sample.mm_token_type_ids.numpy()
    assert types.tolist() == (sample.token_ids.numpy() == image_id(tokenizer)).astype(int).tolist()
    assert not types[branch.sampled].any()
    assert branch.images is not None
    assert sample_of(branch).mm_kwargs["pixel_values"] is branch.images.pixel_values, "shared, not copied"


async def test_sampled_tokens_are_text_whatever_their_ids(tokenizer: Tokenizer) -> None:
    """Sessions refuse such replies; should one get through, it must not take an image's place."""
    conversation = Conversation(tokenizer)
    conversation._reply[0] = image_id(tokenizer)
    trajectory = conversation.session.trajectory
    seen = await tokenizer.images.read([user(A, "what?")])  # type: ignore[union-attr]
    prompt = trajectory.prompt(seen.messages, images=seen.images)
    from tests.chat.replies import make_reply

    trajectory.record(prompt, make_reply(conversation._reply.tolist()))
    (branch,) = trajectory.branches()
    assert branch.token_types is not None
    assert branch.token_types.sum() == NUM_A
    assert not branch.token_types[branch.sampled].any()


async def test_forked_conversation_has_in_each_branch_what_that_branch_saw(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer)
    await conversation.say(user(A, "what?"))
    trunk = list(conversation.chat)
    await conversation.say(user(B, "and this?"))
    conversation.chat = trunk
    await conversation.say(user("sure?"))
    with_both, with_first = conversation.session.trajectory.branches()
    assert [len(branch.images.digests) for branch in (with_both, with_first) if branch.images] == [2, 1]
    for branch in (with_both, with_first):
        assert branch.token_types is not None
        assert branch.images is not None
        assert branch.token_types.sum() * 4 == branch.images.pixel_values.shape[0]


async def test_conversation_without_images_is_plain_text(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer)
    request = await conversation.say(user("hello"))
    (branch,) = conversation.session.trajectory.branches()
    assert (request.mm_kwargs, request.mm_token_type_ids) == ({}, None)
    assert (sample_of(branch).mm_kwargs, sample_of(branch).mm_token_type_ids) == ({}, None)


def sample_of(branch: Branch):  # type: ignore[no-untyped-def]
    rollout = Rollout("env", "0", 1.0, (branch,), 1.0, False, {}, (), 0.0)
    (sample,) = to_samples(rollout, advantage=1.0, run_id="r", group_id="env/0/0", trajectory_id="env/0/0#0")
    return sample


def session(tokenizer: Tokenizer, engine: ScriptedEngine | None = None) -> Session:
    engine = engine or ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids), script=says(tokenizer, "ok"))
    return Session(engine, tokenizer, SamplingPlan("t", seed=0, temperature=1.0, max_tokens=8))


def says(tokenizer: Tokenizer, text: str):  # type: ignore[no-untyped-def]
    ids = np.append(tokenizer.encode(text), min(tokenizer.eos_ids)).astype(np.int32)
    return lambda request: ids


async def test_messages_keep_no_pixels(tokenizer: Tokenizer) -> None:
    played = session(tokenizer)
    await played.complete([user(LARGE, "what?")])
    (branch,) = played.trajectory.branches()
    assert branch.images is not None
    assert len(str(played.trajectory.messages)) < 500


@pytest.mark.parametrize("text", ["<|image_pad|>", "a<|video_pad|>b"])
@pytest.mark.parametrize("role", ["user", "system", "tool"])
async def test_text_that_pretends_to_be_a_image_is_caught(tokenizer: Tokenizer, text: str, role: str) -> None:
    for content in (text, [{"type": "text", "text": text}]):
        with pytest.raises(ImageError, match="stands for an image or video"):
            await session(tokenizer).complete([{"role": role, "content": content}, user(A)])


async def test_placeholder_in_an_edited_reply_is_caught_too(tokenizer: Tokenizer) -> None:
    edited = {"role": "assistant", "content": "<|image_pad|>"}
    with pytest.raises(ImageError, match="2 placeholders for 1 images"):
        await session(tokenizer).complete([user(A), edited, user("and?")])


@pytest.mark.parametrize("placeholder", ["<|image_pad|>", "<|video_pad|>"])
async def test_sampled_placeholder_costs_the_rollout(tokenizer: Tokenizer, placeholder: str) -> None:
    engine = ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids), script=says(tokenizer, placeholder))
    played = session(tokenizer, engine)
    with pytest.raises(InvalidResponse, match="the policy sampled"):
        await played.complete([user(A, "what?")])
    assert isinstance(played.failure, InvalidResponse)
    assert not played.trajectory.messages


async def test_model_of_text_refuses_images(tmp_path: Path) -> None:
    folder = vision_folder(tmp_path)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ImageError, match="does not see any"):
        await session(Tokenizer.from_folder(folder)).complete([user(A)])
