"""Freed memory stays with the process, to be used again in the next step.

Every step allocates the same: frames of samples, activations, gradients. By itself glibc gives much of it back to the
kernel and asks for it anew, which costs more than using it: the kernel clears each page, and on a virtual machine the
host has its part, too. A training step on the CPU takes about a fifth less without that (docs/performance.md). There
is only one arena, because those of other threads, such as libzmq's, give back whatever they can.
"""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Options of mallopt(3)."""
_KEPT_BYTES = 2**31 - 1
_LARGEST_BYTES, _LARGEST_BYTES_BESIDE_GPU = 2**30, 2**25
"""Pieces above it go back: beside a GPU, what is large are copies of weights, which come seldom."""


def keep_freed_memory(*, on_gpu: bool) -> bool:
    """Call it before threads start. False if nothing was done: not glibc, or malloc is set up by the environment."""
    is_set_up = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if is_set_up or mallopt is None:
        return False
    mallopt(_ARENA_MAX, 1)
    mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES_BESIDE_GPU if on_gpu else _LARGEST_BYTES)
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    return True
