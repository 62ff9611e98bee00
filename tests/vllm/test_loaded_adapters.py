"""An adapter that vLLM does not hold as it was given: it is refused, and nothing of it stays.

Workers read a publish beside their decoding: how long the engine waits for it, and what a second one does.
"""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel
from vllm.lora.request import LoRARequest

from inference.api.engine import EngineLimits
from inference.config import InferenceConfig
from inference.errors import WeightsRefused
from inference.vllm_engine.command import CONFIG_VARIABLE, vllm_environment
from inference.vllm_engine.engine import VllmEngine
from inference.vllm_engine.loaded_adapters import LoadedAdapters
from inference.vllm_engine.weight_engine import PublishedWeightEngine
from inference.weights.publish import VerifiedWeights, model_digest, read_publish
from tests.inference.adapters import RANK, make_adapter, publish_adapter
from tests.inference.contract_server import make_model, save_model
from tests.support.waiting import until
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


class SlowWorkers:
    """vLLM's client, as far as staging needs it: one worker, which reads for ever."""

    errored = False

    async def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[None]:
        return [None]


async def test_publish_that_is_not_read_in_time_is_refused_and_the_engine_lives_on() -> None:
    limits = EngineLimits(vocab_size=8, max_model_len=8, max_batch_size=1, max_waiting=1)
    start = ServedWeights(version=0, digest="start")
    engine = VllmEngine(SlowWorkers(), limits, start=start, staging_timeout_s=0.05)  # type: ignore[arg-type]
    with pytest.raises(WeightsRefused, match=r"version 3 was not read within 0\.05 s"):
        await engine.apply_weights("/nowhere/manifest.json", 3)
    assert (engine.served, engine.is_alive, engine.stats.swapping) == (start, True, False)


class SlowReceiver:
    """Reads version 1 until it is told to end, and then takes its time; any other version is refused at once."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.given_up: threading.Event | None = None

    def receive(self, location: str, version: int, given_up: threading.Event) -> VerifiedWeights:
        if version == 1:
            self.given_up = given_up
            self.may_end.wait(60)
            return VerifiedWeights(1, "late", {})
        assert self.may_end.is_set(), "two publishes in memory at a time"
        raise WeightsRefused(f"version {version} is broken")


def test_worker_does_not_wait_for_a_transfer_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not decode meanwhile."""
    config = InferenceConfig.model_validate({"model": {"path": "models/tiny"}, "engine": "vllm"})
    monkeypatch.setenv(CONFIG_VARIABLE, vllm_environment(config, {})[CONFIG_VARIABLE])
    vllm_config = SimpleNamespace(parallel_config=None, model_config=None)
    engine = PublishedWeightEngine(None, vllm_config, torch.device("cpu"), torch.nn.Module())
    receiver = SlowReceiver()
    engine._receiver = receiver  # type: ignore[assignment]
    engine.stage("slow", 1)
    until(lambda: receiver.given_up is not None, within_s=60)
    engine.stage("broken", 2)
    assert receiver.given_up is not None
    assert receiver.given_up.is_set()
    assert engine.staging() is None
    receiver.may_end.set()
    until(lambda: engine.staging() is not None, within_s=60)
    assert engine.staging() == "version 2 is broken", "what came too late is not staged"
