"""Images in the embedded engine: every sampled token has the log probability that the model itself gives it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from inference.api.engine import EngineLimits
from inference.api.generation import Completion, Job
from inference.api.images import Images
from inference.api.requests import MAX_BODY_BYTES, job_of, max_body_bytes
from inference.cli import check_torchvision
from inference.config import InferenceConfig, ServedModelConfig
from inference.errors import BadRequest
from inference.torch_engine.decoder import Decoder
from inference.torch_engine.engine import TorchEngine
from inference.torch_engine.loading import load_slot_model
from inference.torch_engine.slots import EngineSequence
from inference.torch_engine.vision import Vision
from inference.vllm_engine.checkpoint import checkpoint_digest, checkpoint_shapes
from inference.vllm_engine.plugin import vllm_image_limits
from inference.weights.publish import VerifiedWeights, model_digest, read_publish, served_tensors
from inference.weights.receiver import WeightReceiver
from runtime.errors import UserError
from tests.inference.conftest import running_client
from tests.inference.tiny_vision import (
    FAMILIES,
    IMAGE,
    VIDEO,
    VISION_VOCAB_SIZE,
    make_vision_model,
    own_logprobs,
    prompt_with,
    request_with,
)
from tests.support.models import make_tokenizer, publish
from transport.wire.codec import encode
from transport.wire.generation import GENERATE_PATH, GenerateReply, GenerateRequest
from transport.wire.sample import EncodedTensor

SLOTS, LENGTH = 4, 96
Asked = dict[int, tuple[list[int], Images | None]]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> PreTrainedModel:
    return make_vision_model(family)


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "vision"
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def decoder(folder: Path) -> Decoder:
    return Decoder(load_slot_model(ServedModelConfig(path=folder, device="cpu"), SLOTS, LENGTH), SLOTS, LENGTH)


def limits(model: PreTrainedModel) -> EngineLimits:
    return EngineLimits(VISION_VOCAB_SIZE, LENGTH, SLOTS, 64, Vision(model).limits)


def sequence(key: int, prompt: list[int], images: Images | None, max_tokens: int) -> EngineSequence:
    job = Job(prompt=np.array(prompt, np.int32), max_tokens=max_tokens, images=images)
    return EngineSequence(key=key, job=job, seed=key, stop_ids=frozenset(), limit=min(len(prompt) + max_tokens, LENGTH))


def run(decoder: Decoder) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    while decoder.has_work:
        for end in decoder.step():
            assert isinstance(end.result, Completion), end.result
            done[end.key] = end.result
    return done


def assert_exact(models: dict[int, PreTrainedModel], asked: Asked, done: dict[int, Completion]) -> None:
    assert done.keys() == asked.keys()
    for key, completion in done.items():
        tokens = completion.token_ids.tolist()
        for span in completion.versions:
            expected = own_logprobs(models[span.version], *asked[key], tokens)[span.start : span.end]
            ours = torch.from_numpy(completion.logprobs[span.start : span.end])
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_positions_are_those_of_the_model(model: PreTrainedModel) -> None:
    rng = np.random.default_rng(0)
    for sizes in ([(1, 1)], [(2, 3)], [(3, 1), (1, 2)], [(2, 2), (1, 4), (4, 1)]):
        tokens, images = prompt_with(rng, *sizes)
        positions, offsets = model.model.get_rope_index(
            torch.tensor([tokens]),
            mm_token_type_ids=torch.tensor(images.token_types[None].astype(np.int64)),
            image_grid_thw=torch.tensor(images.grids),
        )
        assert images.positions(len(tokens)).tolist() == positions[:, 0].tolist()
        assert images.rotary_offset == int(offsets)


def test_images_matter_to_this_model(model: PreTrainedModel) -> None:
    """Or the tests below would prove nothing."""
    tokens, images = prompt_with(np.random.default_rng(0), (2, 2))
    other = Images(-images.pixel_values, images.grids, images.token_types, 2, b"")
    difference = own_logprobs(model, tokens, images, [7, 8]) - own_logprobs(model, tokens, other, [7, 8])
    assert difference.abs().max() > 1e-2


def test_text_and_images_are_decoded_together_and_exactly(decoder: Decoder, model: PreTrainedModel) -> None:
    rng = np.random.default_rng(1)
    first = prompt_with(rng, (2, 2))
    tokens, images = first
    twin = (tokens, Images(-images.pixel_values, images.grids, images.token_types, 2, b"another image"))
    asked: Asked = {
        0: ([5, 6, 7], None),
        1: first,
        2: prompt_with(rng, (1, 3), (2, 1)),
        3: twin,
        4: first,
        5: prompt_with(rng, (3, 2), (1, 1), (2, 2)),
        6: ([9] * 30, None),
    }
    for key, (prompt, images) in asked.items():
        decoder.add(sequence(key, prompt, images, max_tokens=6 + key))
    assert_exact({0: model}, asked, run(decoder))


def test_new_weights_reach_the_vision_tower_of_running_sequences(
    decoder: Decoder, model: PreTrainedModel, family: str, tmp_path: Path
) -> None:
    models = {0: model, 1: make_vision_model(family, seed=1)}
    rng = np.random.default_rng(2)
    asked: Asked = {0: prompt_with(rng, (2, 2)), 1: ([5, 6], None), 2: prompt_with(rng, (1, 2), (2, 1))}
    for key, (prompt, images) in asked.items():
        decoder.add(sequence(key, prompt, images, max_tokens=8))
    for _ in range(3):
        decoder.step()
    swap(decoder, models[1], tmp_path)
    done = run(decoder)
    assert [span.version for span in done[0].versions] == [0, 1]
    assert_exact(models, asked, done)


def test_sampled_image_token_takes_no_image(decoder: Decoder, model: PreTrainedModel) -> None:
    """Also when its keys and values are computed again, for new weights."""
    asked: Asked = {key: prompt_with(np.random.default_rng(key), (2, 2)) for key in range(12)}
    for key, (prompt, images) in asked.items():
        decoder.add(sequence(key, prompt, images, max_tokens=10))
    done: dict[int, Completion] = {}
    while decoder.has_work:
        decoder.swap(verified(model))
        done |= {end.key: end.result for end in decoder.step()}  # type: ignore[misc]
    assert any(IMAGE in completion.token_ids[:-1] for completion in done.values()), "none was sampled"
    assert_exact({0: model}, asked, done)


def verified(model: PreTrainedModel) -> VerifiedWeights:
    return VerifiedWeights(0, model_digest(model), {name: tensor.clone() for name, tensor in served_tensors(model)})


def swap(decoder: Decoder, model: PreTrainedModel, folder: Path) -> None:
    weights = read_publish(publish(folder, model, 1), version=1, run_id="default")
    assert any(name.startswith("model.visual.") for name in weights.tensors)

    decoder.swap(decoder.loadable(weights))


@asynccontextmanager
async def serving(folder: Path, model: PreTrainedModel) -> AsyncIterator[TorchEngine]:
    slots = load_slot_model(ServedModelConfig(path=folder, device="cpu"), SLOTS, LENGTH)
    engine = TorchEngine(
        Decoder(slots, SLOTS, LENGTH),
        limits(model),
        eos_token_ids=frozenset(),
        seed=0,
        receiver=WeightReceiver("default"),
    )
    try:
        yield engine
    finally:
        await engine.stop(grace_s=5)


async def test_images_travel_over_http(folder: Path, model: PreTrainedModel) -> None:
    rng = np.random.default_rng(3)
    asked = [prompt_with(rng, (2, 2)), prompt_with(rng, (1, 1), (2, 3)), ([5, 6], None)]
    async with serving(folder, model) as engine, running_client(engine, folder) as client:

        async def reply(tokens: list[int], images: Images | None) -> GenerateReply:
            response = await client.post(GENERATE_PATH, data=encode(request_with(tokens, images)))
            assert response.status == 200, await response.text()
            return msgspec.msgpack.decode(await response.read(), type=GenerateReply)

        replies = await asyncio.gather(*(reply(*each) for each in asked))
    for each, answer in zip(asked, replies, strict=True):
        expected = own_logprobs(model, *each, answer.token_ids.numpy().tolist())
        torch.testing.assert_close(torch.tensor(answer.logprobs.numpy()), expected, atol=1e-5, rtol=0)


def changed(request: GenerateRequest, **fields: object) -> GenerateRequest:
    return msgspec.structs.replace(request, **fields)


def bad_requests() -> dict[str, GenerateRequest]:
    tokens, images = prompt_with(np.random.default_rng(4), (2, 2))
    good = request_with(tokens, images)
    pixels, grids = good.mm_kwargs["pixel_values"], good.mm_kwargs["image_grid_thw"]
    ids = np.array(tokens, np.int32)

    def with_grids(*rows: list[int]) -> dict[str, EncodedTensor]:
        return {"pixel_values": pixels, "image_grid_thw": EncodedTensor.of(np.array(rows, np.int64))}

    nan = np.full_like(images.pixel_values, np.nan)
    return {
        "exactly": changed(good, mm_kwargs={"pixel_values": pixels}),
        "mm_token_type_ids and mm_kwargs": changed(good, mm_token_type_ids=None),
        "float32 of 2": changed(good, mm_kwargs={"pixel_values": grids, "image_grid_thw": grids}),
        "pixel_values must be": changed(good, mm_kwargs=with_grids([1, 2, 2])),
        "multiples of 2": changed(good, mm_kwargs=with_grids([1, 1, 16])),
        "got [16, 48] for grids": changed(good, mm_kwargs=with_grids([1, 2**62, 4])),
        "NaN": changed(good, mm_kwargs={"pixel_values": EncodedTensor.of(nan), "image_grid_thw": grids}),
        "exactly at the image tokens": changed(good, token_ids=EncodedTensor.of(np.where(ids == IMAGE, 5, ids))),
        "must be 1 exactly": changed(good, mm_kwargs={}, mm_token_type_ids=None),
        "the images need": changed(good, mm_kwargs=with_grids([1, 2, 4], [1, 2, 4])),
        "other than images": changed(good, token_ids=EncodedTensor.of(np.append(ids[:-1], VIDEO).astype(np.int32))),
        "ends within an image": changed(
            good,
            token_ids=EncodedTensor.of(ids[: ids.tolist().index(IMAGE) + 4]),
            mm_token_type_ids=EncodedTensor.of(images.token_types[: ids.tolist().index(IMAGE) + 4]),
        ),
    }


@pytest.mark.parametrize("reason", bad_requests())
def test_images_that_do_not_fit_their_prompt_are_refused(reason: str) -> None:
    model = make_vision_model("qwen3_vl")
    request = bad_requests()[reason]
    with pytest.raises(BadRequest) as refused:
        job_of(request, limits(model))
    assert reason in str(refused.value)


def test_model_of_text_takes_no_images() -> None:
    request = request_with(*prompt_with(np.random.default_rng(5), (1, 1)))
    with pytest.raises(BadRequest, match="the model in service takes no images"):
        job_of(request, EngineLimits(VISION_VOCAB_SIZE, LENGTH, SLOTS, 64))


def test_vllm_for_cpus_says_what_a_vision_model_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.cli.is_cpu_build", lambda: True)
    config = InferenceConfig.model_validate({"model": {"path": folder}, "engine": "vllm"})
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(UserError, match="without torchvision: use --engine torch"):
        check_torchvision(config)
    installed = ModuleType("torchvision")
    installed.__spec__ = ModuleSpec("torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision", installed)
    check_torchvision(config)


def vllm_config(folder: Path, **multimodal: object) -> SimpleNamespace:
    """The part of vLLM's `ServedModelConfig` that is read."""
    config = AutoConfig.from_pretrained(folder)
    settings = SimpleNamespace(**{"mm_device_do_normalize": False, **multimodal})
    return SimpleNamespace(hf_config=config, hf_text_config=config.get_text_config(), multimodal_config=settings)


def test_vllm_takes_images_as_they_are_or_does_not_start(folder: Path, model: PreTrainedModel) -> None:
    assert vllm_image_limits(vllm_config(folder)) == Vision(model).limits
    with pytest.raises(RuntimeError, match="normalise images twice"):
        vllm_image_limits(vllm_config(folder, mm_device_do_normalize=True))


def test_vllm_must_be_told_how_positions_are_interleaved(folder: Path, family: str) -> None:
    config = vllm_config(folder)
    config.hf_text_config.rope_parameters.pop("mrope_interleaved", None)
    if family == "qwen3_vl":
        with pytest.raises(RuntimeError, match="mrope_interleaved"):
            vllm_image_limits(config)
    else:
        assert vllm_image_limits(config) is not None


def test_vllm_knows_the_tensors_by_the_names_of_the_publish(folder: Path, model: PreTrainedModel) -> None:
    """Those in the files of a Qwen2.5-VL are older."""
    assert checkpoint_shapes(folder) == {name: tuple(tensor.shape) for name, tensor in served_tensors(model)}
    assert checkpoint_digest(folder, torch.float32) == model_digest(model)


def test_requests_with_images_may_be_larger(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert max_body_bytes(folder) > max_body_bytes(tmp_path) == MAX_BODY_BYTES
