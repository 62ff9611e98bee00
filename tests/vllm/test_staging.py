"""How long the engine waits for its workers to read a publish."""

import pytest

from inference.engine import EngineLimits
from inference.errors import WeightsRefused
from inference.vllm_engine.engine import VllmEngine
from transport.generation import ServedWeights


class SlowWorkers:
    """vLLM's client, as far as staging needs it: one worker, which reads for ever."""

    errored = False

    async def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[None]:
        return [None]


async def test_publish_that_is_not_read_in_time_is_refused_and_the_engine_lives_on() -> None:
    limits = EngineLimits(vocab_size=8, max_model_len=8, max_batch_size=1, max_waiting=1)
    start = ServedWeights(version=0, digest="start")
    engine = VllmEngine(SlowWorkers(), limits, start=start, pause_mode="keep", staging_timeout_s=0.05)  # type: ignore[arg-type]
    with pytest.raises(WeightsRefused, match=r"version 3 was not read within 0\.05 s"):
        await engine.apply_weights("/nowhere/manifest.json", 3)
    assert (engine.served, engine.is_alive, engine.stats.swapping) == (start, True, False)
