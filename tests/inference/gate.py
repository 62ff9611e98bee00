"""`Gate`: stops an engine's thread where a test wants it."""

import threading

import numpy as np


class Gate:
    """Holds the engine between two decode steps, once a sequence has sampled `at` tokens."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, sampled: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> bool:
        if len(sampled) == self._at:
            self.reached.set()
            assert self.opened.wait(30)
        return False
