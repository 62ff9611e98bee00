"""`ReplyMemory`: where the frames of a reply are read into, used again once the reply has left.

Fresh memory costs several times what copying into it does, because the kernel has to find and clear its pages; and the
allocator gives a reply's memory back as soon as it is free, to ask for it anew with the next one. So one buffer stays.
It is numpy's, because numpy asks for huge pages where there are any: reading into them and sending from them is faster.
A reply that comes while the buffer is still being sent gets memory of its own, as all would without this.
"""

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from transport.alignment import LINE_BYTES, address_of, lead_bytes

_Bytes = npt.NDArray[np.uint8]
_STEP_BYTES = 1 << 20
"""Sizes are rounded up to this: replies of about the same size should not each need memory of their own."""


class ReplyMemory:
    """Keeps one buffer, for replies of up to `max_kept_bytes`.

    May be used from several threads, and by the garbage collector at any moment, so there is no lock: the deque's own
    operations are atomic.
    """

    def __init__(self, max_kept_bytes: int) -> None:
        self._max_kept_bytes = max_kept_bytes + _STEP_BYTES + LINE_BYTES
        self._kept: deque[_Bytes] = deque(maxlen=1)

    def take(self, num_bytes: int) -> memoryview:
        """Room for `num_bytes`, with anything in it, from the beginning of a cache line.

        It is used again when this view and all slices of it are gone."""
        buffer = self._pop()
        if buffer is None or len(buffer) < num_bytes + LINE_BYTES:
            buffer = np.zeros(-(-max(num_bytes, 1) // _STEP_BYTES) * _STEP_BYTES + LINE_BYTES, dtype=np.uint8)
        # A slice of a memoryview keeps the array alive, but not the first memoryview: so an array is what we watch.
        array = buffer[lead_bytes(0, address_of(buffer)) :]
        weakref.finalize(array, self._take_back, buffer).atexit = False
        return array.data[:num_bytes]

    def _take_back(self, buffer: _Bytes) -> None:
        """Called by whoever drops the last view, which may be a thread of libzmq's binding."""
        if len(buffer) <= self._max_kept_bytes:
            other = self._pop()
            self._kept.append(buffer if other is None or len(other) < len(buffer) else other)

    def _pop(self) -> _Bytes | None:
        try:
            return self._kept.pop()
        except IndexError:
            return None
