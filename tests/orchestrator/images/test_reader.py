"""Pictures in messages: read once, shared, and refused with a reason."""

import asyncio
import gc
from pathlib import Path

import numpy as np
import pytest

from chat.errors import ImageError
from chat.images.reader import ImageReader
from chat.tokenizer import Tokenizer
from orchestrator.engines.http_client import MAX_UPLOADS, Uploads
from orchestrator.engines.protocol import InvalidResponse
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.session import SamplingPlan, Session
from tests.orchestrator.images.drawn import data_url, picture, user, vision_folder
from transport.wire.generation import GenerateRequest
from transport.wire.tensor import EncodedTensor

A, B = data_url(picture(1)), data_url(picture(2, 32, 16))
LARGE = data_url(picture(3, 256, 256))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_folder(vision_folder(tmp_path))


@pytest.fixture
def reader(tokenizer: Tokenizer) -> ImageReader:
    assert tokenizer.images is not None
    return tokenizer.images


def session(tokenizer: Tokenizer, engine: ScriptedEngine | None = None) -> Session:
    engine = engine or ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids), script=says(tokenizer, "ok"))
    return Session(engine, tokenizer, SamplingPlan("t", seed=0, temperature=1.0, max_tokens=8))


def says(tokenizer: Tokenizer, text: str):  # type: ignore[no-untyped-def]
    ids = np.append(tokenizer.encode(text), min(tokenizer.eos_ids)).astype(np.int32)
    return lambda request: ids


async def copies_held(reader: ImageReader, url: str, num_rollouts: int) -> tuple[int, int]:
    """Different copies that so many rollouts at the same time get, and how many the reader knows of."""
    seen = await asyncio.gather(*(reader.read([user(url, "what?")]) for _ in range(num_rollouts)))
    return len({id(picture) for each in seen for picture in each.pictures.values()}), len(reader.shelf)


async def test_rollouts_of_a_group_share_one_copy_of_their_picture(reader: ImageReader) -> None:
    assert await copies_held(reader, LARGE, num_rollouts=8) == (1, 1)
    await asyncio.sleep(0)  # the turn of the loop that woke this test still holds what it waited for
    gc.collect()
    assert len(reader.shelf) == 0, "what nobody holds is let go"


async def test_a_picture_is_read_off_the_event_loop(reader: ImageReader) -> None:
    reading = asyncio.create_task(reader.read([user(A, "what?")]))
    await asyncio.sleep(0)  # on the spot, it would be read by now
    assert not reading.done()
    assert len((await reading).pictures) == 1


async def test_rows_of_pictures_share_their_memory(reader: ImageReader) -> None:
    seen = await reader.read([user(A, B)])
    parts = list(seen.pictures.values())
    joined = reader.join(parts)
    assert joined is reader.join(parts)
    assert reader.join(parts[:1]) is parts[0]
    assert joined.image_grid_thw.numpy().tolist() == [[1, 4, 4], [1, 4, 8]]
    assert joined.pixel_values.shape == (16 + 32, 48)


async def test_messages_keep_no_pixels(tokenizer: Tokenizer) -> None:
    played = session(tokenizer)
    await played.complete([user(LARGE, "what?")])
    (branch,) = played.trajectory.branches()
    assert branch.pictures is not None
    assert len(str(played.trajectory.messages)) < 500


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.com/cat.png", "nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        ("data:text/plain;base64,aGVsbG8=", "base64 data URL"),
        ("data:image/png;base64,%%%", "cannot be read"),
        ("data:image/png;base64,aGVsbG8=", "cannot be read"),
        (A[: len(A) // 2], "cannot be read"),
        (data_url(picture(1), "BMP"), "cannot be read"),
    ],
)
async def test_bad_picture_is_refused_with_a_reason(reader: ImageReader, url: str, reason: str) -> None:
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    with pytest.raises(ImageError, match=reason):
        await reader.read([message])


async def test_part_without_a_picture_is_refused(reader: ImageReader) -> None:
    with pytest.raises(ImageError, match="no URL"):
        await reader.read([{"role": "user", "content": [{"type": "image"}]}])


@pytest.mark.parametrize("text", ["<|image_pad|>", "a<|video_pad|>b"])
@pytest.mark.parametrize("role", ["user", "system", "tool"])
async def test_text_that_pretends_to_be_a_picture_is_caught(tokenizer: Tokenizer, text: str, role: str) -> None:
    for content in (text, [{"type": "text", "text": text}]):
        with pytest.raises(ImageError, match="stands for a picture or video"):
            await session(tokenizer).complete([{"role": role, "content": content}, user(A)])


async def test_placeholder_in_an_edited_reply_is_caught_too(tokenizer: Tokenizer) -> None:
    edited = {"role": "assistant", "content": "<|image_pad|>"}
    with pytest.raises(ImageError, match="2 placeholders for 1 pictures"):
        await session(tokenizer).complete([user(A), edited, user("and?")])


@pytest.mark.parametrize("placeholder", ["<|image_pad|>", "<|video_pad|>"])
async def test_sampled_placeholder_costs_the_rollout(tokenizer: Tokenizer, placeholder: str) -> None:
    engine = ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids), script=says(tokenizer, placeholder))
    played = session(tokenizer, engine)
    with pytest.raises(InvalidResponse, match="the policy sampled"):
        await played.complete([user(A, "what?")])
    assert isinstance(played.failure, InvalidResponse)
    assert not played.trajectory.messages


async def test_model_of_text_refuses_pictures(tmp_path: Path) -> None:
    folder = vision_folder(tmp_path)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ImageError, match="does not see any"):
        await session(Tokenizer.from_folder(folder)).complete([user(A)])


async def test_few_requests_with_pictures_are_in_memory_at_a_time() -> None:
    uploads = Uploads()
    pixels = {"pixel_values": EncodedTensor.of(np.zeros(8, np.float32))}
    ids = EncodedTensor.of(np.zeros(1, np.int32))
    request = GenerateRequest(request_id="r", token_ids=ids, max_tokens=1, mm_kwargs=pixels)
    bodies = [uploads.body(request) for _ in range(MAX_UPLOADS + 1)]
    for body in bodies[:-1]:
        assert not isinstance(body, bytes)
        await anext(body)
    waiting = asyncio.ensure_future(anext(bodies[-1]))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert not waiting.done()
    await bodies[0].aclose()  # type: ignore[union-attr]
    assert await asyncio.wait_for(waiting, 30)
    for body in bodies[1:]:
        await body.aclose()  # type: ignore[union-attr]
    assert isinstance(uploads.body(GenerateRequest(request_id="r", token_ids=ids, max_tokens=1)), bytes)
