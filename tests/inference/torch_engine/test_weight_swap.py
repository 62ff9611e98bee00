"""New weights, whole or as adapters, with requests in flight: every token is of its span's version."""

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from inference.api.generation import Completion, Job
from inference.errors import NonFiniteLogits, Unavailable, WeightsRefused
from inference.torch_engine.engine import TorchEngine
from inference.weights.publish import VerifiedWeights, model_digest, read_publish
from tests.inference.adapters import make_adapter, publish_adapter, with_adapter
from tests.inference.conftest import running_engine
from tests.inference.gate import Gate
from tests.support.models import make_model, publish, save_model, score
from tests.support.waiting import until_async
from transport.wire.sample import VersionSpan
from transport.wire.weights import read_weight_manifest


def job(prompt: list[int], max_tokens: int, gate: Gate | None = None) -> Job:
    return Job(prompt=np.array(prompt, dtype=np.int32), max_tokens=max_tokens, seed=len(prompt), should_stop=gate)


async def swap_at_gate(engine: TorchEngine, gate: Gate, path: Path, version: int) -> None:
    """Ask for the swap while the engine is held, so that it happens right after the step that the gate is in."""
    await asyncio.to_thread(gate.reached.wait, 30)
    swap = asyncio.create_task(engine.apply_weights(path, version))
    await until_async(lambda: engine.stats.swapping, 60)
    gate.opened.set()
    assert (await asyncio.wait_for(swap, 30)).version == version


def assert_spans_are_exact(models: dict[int, PreTrainedModel], prompt: list[int], completion: Completion) -> None:
    tokens = completion.token_ids.tolist()
    covered = 0
    for span in completion.versions:
        assert span.start == covered
        expected = score(models[span.version], prompt, tokens)[span.start : span.end]
        ours = torch.from_numpy(completion.logprobs[span.start : span.end])
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
        covered = span.end
    assert covered == len(tokens)


async def test_swap_in_flight_keeps_requests_and_every_span_is_exact(
    engine: TorchEngine, model: PreTrainedModel, tmp_path: Path
) -> None:
    models = {0: model, 1: make_model(1), 2: make_model(2)}
    gates = [Gate(10), Gate(25)]
    asked = [[5], [6, 7], [8, 9, 10], [11] * 30]
    gated = asyncio.create_task(engine.generate(job([5, 5], 40, gates[0])))
    tasks = [asyncio.create_task(engine.generate(job(prompt, 40))) for prompt in asked]
    other = asyncio.create_task(engine.generate(job([6, 6, 6], 40, gates[1])))
    await swap_at_gate(engine, gates[0], publish(tmp_path, models[1], 1), 1)
    await swap_at_gate(engine, gates[1], publish(tmp_path, models[2], 2), 2)
    first = await asyncio.wait_for(gated, 30)
    assert [span.version for span in first.versions] == [0, 1, 2]
    assert first.versions[0] == VersionSpan(0, 0, 10)
    assert_spans_are_exact(models, [5, 5], first)
    for prompt, task in zip(asked, tasks, strict=True):
        completion = await asyncio.wait_for(task, 30)
        assert len(completion.versions) == 3
        assert_spans_are_exact(models, prompt, completion)
    assert_spans_are_exact(models, [6, 6, 6], await other)


async def test_untied_model_swaps_its_head_too(tmp_path: Path) -> None:
    old, new = make_model(4, tied=False), make_model(5, tied=False)
    async with running_engine(save_model(tmp_path / "model", old)) as engine:
        await engine.apply_weights(publish(tmp_path, new, 1), 1)
        assert_spans_are_exact({1: new}, [5, 6], await engine.generate(job([5, 6], 20)))


async def test_weights_with_nan_fail_requests_but_not_the_engine(
    engine: TorchEngine, model: PreTrainedModel, tmp_path: Path
) -> None:
    broken = make_model(1)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    await engine.apply_weights(publish(tmp_path, broken, 1), 1)
    with pytest.raises(NonFiniteLogits, match="version 1"):
        await engine.generate(job([5], 5))
    await engine.apply_weights(publish(tmp_path, model, 2), 2)
    assert len((await engine.generate(job([5], 5))).token_ids) == 5


async def test_engine_that_stops_while_weights_are_fetched_says_so(
    engine: TorchEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread is gone: nobody would ever answer."""
    fetching, fetched = threading.Event(), threading.Event()
    path = publish(tmp_path, make_model(1), 1)

    def slowly(manifest: Path, **expected: object) -> VerifiedWeights:
        fetching.set()
        assert fetched.wait(30)
        return read_publish(manifest, version=1, run_id="default")

    monkeypatch.setattr("inference.weights.receiver.read_publish", slowly)
    swap = asyncio.create_task(engine.apply_weights(path, 1))
    await asyncio.to_thread(fetching.wait, 30)
    await engine.stop(grace_s=0)
    fetched.set()
    with pytest.raises(Unavailable, match="stopping"):
        await asyncio.wait_for(swap, 60)


async def test_adapters_change_in_flight_and_every_span_is_exact(
    engine: TorchEngine, model: PreTrainedModel, tmp_path: Path
) -> None:
    adapters = {1: make_adapter(model, 1), 2: make_adapter(model, 2, ("k_proj", "q_proj"))}
    models = {0: model, 1: with_adapter(model, adapters[1]), 2: with_adapter(model, adapters[2])}
    gates = [Gate(10), Gate(25)]
    first = asyncio.create_task(engine.generate(job([5, 5], 40, gates[0])))
    other = asyncio.create_task(engine.generate(job([6, 6, 6], 40, gates[1])))
    for version in (1, 2):
        path = publish_adapter(tmp_path, model, adapters[version], version)
        await swap_at_gate(engine, gates[version - 1], path, version)
        assert engine.served.digest == read_weight_manifest(path).digest
    completion = await asyncio.wait_for(first, 30)
    assert [span.version for span in completion.versions] == [0, 1, 2]
    assert_spans_are_exact(models, [5, 5], completion)
    assert_spans_are_exact(models, [6, 6, 6], await asyncio.wait_for(other, 30))


async def test_adapter_of_another_base_is_refused_and_the_old_version_stays(
    engine: TorchEngine, model: PreTrainedModel, tmp_path: Path
) -> None:
    adapter = make_adapter(model, 1)
    served = await engine.apply_weights(publish_adapter(tmp_path, model, adapter, 1), 1)
    with pytest.raises(WeightsRefused, match="adapter of another model: its base has digest"):
        await engine.apply_weights(publish_adapter(tmp_path, make_model(7), adapter, 2), 2)
    assert engine.served == served
    assert_spans_are_exact({1: with_adapter(model, adapter)}, [5, 6], await engine.generate(job([5, 6], 20)))


@pytest.mark.parametrize("fault", ["half a pair", "unknown module", "other rank"])
async def test_adapter_that_does_not_fit_is_refused(
    engine: TorchEngine, model: PreTrainedModel, tmp_path: Path, fault: str
) -> None:
    adapter = make_adapter(model, 1)
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    tensor = adapter.pop(name)
    if fault == "unknown module":
        adapter["model.layers.9.self_attn.q_proj.lora_A.weight"] = tensor
    elif fault == "other rank":
        adapter[name] = torch.cat([tensor, tensor])
    with pytest.raises(WeightsRefused, match="adapter of another model"):
        await engine.apply_weights(publish_adapter(tmp_path, model, adapter, 1), 1)
    assert (engine.served.version, engine.served.digest) == (0, model_digest(model))


async def test_whole_version_becomes_the_base_of_adapters(
    engine: TorchEngine, model: PreTrainedModel, tmp_path: Path
) -> None:
    await engine.apply_weights(publish_adapter(tmp_path, model, make_adapter(model, 1), 1), 1)
    await engine.apply_weights(publish(tmp_path, make_model(3), 2), 2)
    assert engine.served.digest == model_digest(make_model(3))
    adapter = make_adapter(model, 4)
    with pytest.raises(WeightsRefused, match="another model"):
        await engine.apply_weights(publish_adapter(tmp_path, model, adapter, 3), 3)
    await engine.apply_weights(publish_adapter(tmp_path, make_model(3), adapter, 4), 4)
    assert_spans_are_exact({4: with_adapter(make_model(3), adapter)}, [5, 6], await engine.generate(job([5, 6], 20)))
