"""Workers read a publish beside their decoding: how long the engine waits for it, and what a second one does."""

import threading
from types import SimpleNamespace

import pytest
import torch

from inference.api.engine import EngineLimits
from inference.config import InferenceConfig
from inference.errors import WeightsRefused
from inference.vllm_engine.command import CONFIG_VARIABLE, vllm_environment
from inference.vllm_engine.engine import VllmEngine
from inference.vllm_engine.weight_engine import PublishedWeightEngine
from inference.weights.publish import VerifiedWeights
from tests.support.waiting import until
from transport.wire.generation import ServedWeights


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
