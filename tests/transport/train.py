"""A trainer rank as a process of its own: `python -m tests.transport.train ENDPOINT STATE RANK WORLD_SIZE`.

"Trains" by appending `step digest rows` to STATE; every second step is a durable checkpoint. After a kill it continues
from the last checkpoint, dropping what came after it, as a real trainer does.
"""

import os
import sys
from pathlib import Path

from tests.transport.samples import RUN
from transport.client import BatchClient
from transport.codec import encode, frame_hash
from transport.durable import write_durably


def main(endpoint: str, state: Path, rank: int, world_size: int) -> None:
    trained = state.read_text().splitlines() if state.exists() else []
    with BatchClient(
        endpoint,
        RUN,
        rank=rank,
        world_size=world_size,
        last_committed=len(trained),
        peer_timeout_s=2,
        lost_timeout_s=30,
        heartbeat_s=0.2,
    ) as client:
        step = client.hello()
        while (manifest := client.manifest(step)) is not None:
            samples = client.samples(manifest, range(rank, manifest.num_samples, world_size))
            digest = frame_hash(b"".join(encode(sample) for sample in samples))
            trained.append(f"{step} {digest}")
            if rank == 0:
                client.weights_published(step, f"/weights/{step}", str(digest))
                client.trained(step)
            if step % 2 == 0:
                write_durably(state, ["\n".join(trained).encode() + b"\n"])
                if rank == 0:
                    client.committed(step)
            step += 1
    print("finished", os.getpid(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
