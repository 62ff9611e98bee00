"""A batch server as a process of its own: `python -m tests.transport.server.serve DIR ENDPOINT NUM_STEPS MAX_AHEAD`.

Cuts batches 1 to NUM_STEPS with back-pressure, prints its endpoint, and exits when the last step is committed.
"""

import asyncio
import sys
from pathlib import Path

import uvloop

from tests.transport.samples import RUN, make_batch
from transport.outbox.outbox import Outbox
from transport.server.server import BatchServer


async def main(directory: Path, endpoint: str, num_steps: int, max_ahead: int) -> None:
    outbox = Outbox(directory, RUN, keep_retired=True)
    async with BatchServer(endpoint, outbox, park_s=0.2) as server:
        print(server.endpoint, flush=True)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve())
            while outbox.next_step <= num_steps:
                await server.until(lambda: outbox.num_untrained < max_ahead)
                assert outbox.num_untrained < max_ahead
                await server.publish(make_batch(outbox.next_step))
            server.end(num_steps)
            await server.until(lambda: server.last_committed >= num_steps)
            await server.until(lambda: not server.peers())
            serving.cancel()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])))
