"""A batch server to attack: `python -m tests.faults.security.attacked_server FOLDER`, a process that can crash alone.

Prints its endpoint, then, twice a second, how often it rejected what. Runs until it is stopped.
"""

import asyncio
import json
import sys
from pathlib import Path

import uvloop

from runtime.process.logging import start_logging
from tests.transport.samples import make_batch
from transport.outbox.outbox import Outbox
from transport.server.server import BatchServer
from transport.wire.codec import EncodedBatch

RUN = "attacked"
NUM_SAMPLES = 16
REPORT_S = 0.5


def first_batch() -> EncodedBatch:
    """The one that it serves."""
    return make_batch(1, NUM_SAMPLES, num_tokens=64, run_id=RUN)


async def serve(folder: Path) -> None:
    """Serve batch 1 and report."""
    async with BatchServer("tcp://127.0.0.1:0", Outbox(folder, RUN)) as server, asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve())
        await server.publish(first_batch())
        print(server.endpoint, flush=True)
        while True:
            await asyncio.sleep(REPORT_S)
            print(json.dumps(server.rejections()), flush=True)


if __name__ == "__main__":
    start_logging()
    uvloop.run(serve(Path(sys.argv[1])))
