"""Keeps the event loop quick while threads of the same process encode batches and add up metrics.

Python hands the interpreter from one busy thread to another only every 5 ms by default. The loop gives it up at every
system call and large array operation, and would then wait 5 ms to get it back, hundreds of times while a batch is
encoded. A fifth of that takes most of the waits out of the lag of the loop.
"""

import sys

SWITCH_INTERVAL_S = 0.001


def prefer_event_loop() -> None:
    """Set for the whole process, once, before threads start."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
