"""An adapter that vLLM does not hold as it was given: it is refused, and nothing of it stays."""

from pathlib import Path

import pytest
from transformers import PreTrainedModel
from vllm.lora.request import LoRARequest

from inference.config import InferenceConfig
from inference.errors import WeightsRefused
from inference.vllm_engine.loaded_adapters import LoadedAdapters
from inference.weights.publish import VerifiedWeights, model_digest, read_publish
from tests.inference.adapters import RANK, make_adapter, publish_adapter
from tests.inference.contract_server import make_model, save_model
from transport.wire.generation import ServedWeights


class WrongEngine:
    """The part of vLLM's client that `LoadedAdapters` uses. Its workers answer `digests`; an exception is raised."""

    def __init__(self, *digests: str | Exception) -> None:
        self.loaded: set[int] = set()
        self._digests = iter(digests)

    async def add_lora(self, request: LoRARequest) -> bool:
        self.loaded.add(request.lora_int_id)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        self.loaded.discard(lora_id)
        return True

    async def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[str]:
        answer = next(self._digests)
        if isinstance(answer, Exception):
            raise answer
        return [answer]


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    return make_model(0)


def adapters_of(client: WrongEngine, base: PreTrainedModel, folder: Path) -> LoadedAdapters:
    config = InferenceConfig.model_validate(
        {
            "model": {"path": save_model(folder / "model", base)},
            "run": {"dir": folder.parent, "name": folder.name},
            "vllm": {"max_lora_rank": RANK},
        }
    )
    return LoadedAdapters(client, ServedWeights(version=0, digest=model_digest(base)), config)  # type: ignore[arg-type]


def adapter(base: PreTrainedModel, folder: Path, version: int) -> VerifiedWeights:
    path = publish_adapter(folder / "weights", base, make_adapter(base, version), version)
    return read_publish(path, version=version, run_id="default")


@pytest.mark.parametrize("answer", ["another digest", RuntimeError("the adapter of q_proj is not what was given")])
async def test_adapter_that_is_held_wrongly_is_refused_and_leaves_with_its_folder(
    tmp_path: Path, base: PreTrainedModel, answer: str | Exception
) -> None:
    client = WrongEngine(answer)
    adapters = adapters_of(client, base, tmp_path)
    with pytest.raises(WeightsRefused, match="vLLM does not take version 1"):
        await adapters.load(adapter(base, tmp_path, 1))
    assert adapters.newest is None
    assert client.loaded == set()
    assert list((tmp_path / "adapters").iterdir()) == []


async def test_disk_that_is_full_refuses_the_version_and_leaves_nothing(tmp_path: Path, base: PreTrainedModel) -> None:
    client = WrongEngine()
    adapters = adapters_of(client, base, tmp_path)
    (tmp_path / "adapters").write_text("no folder can be made here")
    with pytest.raises(WeightsRefused, match="version 1"):
        await adapters.load(adapter(base, tmp_path, 1))
    assert adapters.newest is None
