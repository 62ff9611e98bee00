"""A batch server to attack: `python -m benchmarks.attacked_server FOLDER`, a process of its own so that it can crash.

Prints its endpoint, then, twice a second, how often it rejected what. Runs until it is stopped.
"""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import uvloop

from runtime.logging import start_logging
from transport.batch import EncodedBatch, build_batch
from transport.outbox import Outbox
from transport.sample import TrainingSample, VersionSpan
from transport.server import BatchServer
from transport.tensor import EncodedTensor

RUN = "attacked"
NUM_SAMPLES, NUM_TOKENS = 16, 64
REPORT_S = 0.5


def make_batch() -> EncodedBatch:
    """Batch 1, the same bytes every time."""
    return build_batch(RUN, 1, [_sample(number) for number in range(NUM_SAMPLES)])


def _sample(number: int) -> TrainingSample:
    draw = np.random.default_rng(number)
    return TrainingSample(
        run_id=RUN,
        env_name="env",
        example_id=str(number),
        group_id=f"env/{number}/0",
        trajectory_id=f"env/{number}/0#0",
        token_ids=EncodedTensor.of(draw.integers(0, 1000, NUM_TOKENS, dtype=np.int32)),
        loss_mask=EncodedTensor.of(np.arange(NUM_TOKENS) > 0),
        logprobs=EncodedTensor.of(-draw.random(NUM_TOKENS, dtype=np.float32)),
        advantages=1.0,
        temperature=1.0,
        reward=1.0,
        versions=(VersionSpan(0, 1, NUM_TOKENS),),
    )


async def serve(folder: Path) -> None:
    """Serve batch 1 and report."""
    async with BatchServer("tcp://127.0.0.1:0", Outbox(folder, RUN)) as server, asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve())
        await server.publish(make_batch())
        print(server.endpoint, flush=True)
        while True:
            await asyncio.sleep(REPORT_S)
            print(json.dumps(server.rejections()), flush=True)


if __name__ == "__main__":
    start_logging()
    uvloop.run(serve(Path(sys.argv[1])))
