"""The embedded engine serves LoRA adapters: merged into a base that is proven, exact for every token."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from inference.errors import WeightsRefused
from inference.torch_engine.engine import TorchEngine
from inference.weights.publish import model_digest
from tests.inference.adapters import make_adapter, publish_adapter, with_adapter
from tests.inference.gate import Gate
from tests.inference.test_weight_swap import assert_spans_are_exact, job, swap_at_gate
from tests.support.models import make_model, publish
from transport.wire.weights import read_weight_manifest


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
