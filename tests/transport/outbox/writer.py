"""Fills an outbox until it is killed: `python -m tests.transport.outbox.writer DIR`. Prints what it finished.

`put N`, `trained N` and `committed N` appear only after the call returned, so whatever was printed must survive.
"""

import sys
from pathlib import Path

from tests.transport.samples import RUN, make_batch
from transport.outbox.outbox import Outbox


def main(directory: Path) -> None:
    outbox = Outbox(directory, RUN)
    print("open", outbox.next_step, flush=True)
    while True:
        step = outbox.next_step
        outbox.put(make_batch(step, num_samples=4, num_tokens=2000))
        print("put", step, flush=True)
        outbox.mark_trained(step)
        print("trained", step, flush=True)
        if step % 3 == 0:
            outbox.retire(step)
            print("committed", step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
