"""A trainer, as far as engines see it on the `zmq` channel: `python -m ... MODEL VERSION [DIE_AFTER_READS]`.

Serves the weights of the model plus a little under VERSION, prints where, and stays until its input ends, or until it
kills itself in the middle of a transfer. Starts in a second: no torch.
"""

import os
import signal
import sys
from pathlib import Path

from safetensors.numpy import load_file

from tests.transport.weights.weight_ranks import Tensors, WeightRanks
from transport.weights.server import WeightStore


class MortalStore(WeightStore):
    """Ends the process at the `die_after`-th read of bytes."""

    die_after = 0

    def read(self, version: int, offset: int, num_bytes: int) -> memoryview:
        self.die_after -= 1
        if self.die_after == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(version, offset, num_bytes)


def weights_of(model: Path, version: int) -> Tensors:
    """The same for the same version."""
    return {name: value + version / 1024 for name, value in load_file(model / "model.safetensors").items()}


def main(model: Path, version: int, die_after: int = 0) -> None:
    store = MortalStore(2)
    store.die_after = die_after
    with WeightRanks(1, stores=[store]) as ranks:
        print(ranks.put(weights_of(model, version), version), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
