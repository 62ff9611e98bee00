"""`python -m tests.faults.liveness.jumping_clock MODULE ARGUMENT...`: a service on a machine with a bad clock.

The wall clock jumps by up to a day, back or forth, every time it is asked, as after a repair by NTP or a suspended
virtual machine. The monotonic clock is far from that of other processes, as on another machine: a deadline that crossed
a process boundary would be off by eleven days.
"""

import random
import runpy
import sys
import time

DAY_S = 86_400.0
MONOTONIC_OFFSET_S = 1e6


def spoil_clocks(seed: int) -> None:
    """Before anything of the service is imported."""
    wall, monotonic, draw = time.time, time.monotonic, random.Random(seed)
    time.time = lambda: wall() + draw.uniform(-DAY_S, DAY_S)
    time.time_ns = lambda: int(time.time() * 1e9)
    time.monotonic = lambda: monotonic() + MONOTONIC_OFFSET_S


if __name__ == "__main__":
    spoil_clocks(seed=len(sys.argv[1]))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
