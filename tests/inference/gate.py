"""`Gate`: stops an engine's thread where a test wants it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from inference.api.generation import Job
from inference.torch_engine.engine import TorchEngine


class Gate:
    """Holds the engine between two decode steps, once a sequence has sampled `at` tokens."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, sampled: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> bool:
        if len(sampled) == self._at:
            self.reached.set()
            assert self.opened.wait(30)
        return False


@asynccontextmanager
async def held(engine: TorchEngine) -> AsyncIterator[None]:
    """Nothing is decoded inside the block: a request of one token holds the engine, in a slot of its own."""
    gate = Gate(1)
    job = Job(prompt=np.array([5], dtype=np.int32), max_tokens=1, should_stop=gate)
    holding = asyncio.create_task(engine.generate(job))
    await asyncio.to_thread(gate.reached.wait, 30)
    try:
        yield
    finally:
        gate.opened.set()
        await holding
