"""`Backoff`: how long to wait between two tries of something that failed. Every pause between tries of ours is one.

    Backoff(0.2, 10.0).pause_s(n)   n = 1: 0.2   2: 0.4   3: 0.8   ...   6: 6.4   7 and more: 10.0 seconds

Jitter: when a server goes away, all of its clients fail at the same moment. With equal pauses they would also come back
at the same moment, and overload it again. So where several share what failed, each pause is multiplied by a random
factor between two bounds. One caller that waits for its own disk needs none.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

_MAX_DOUBLINGS = 64
"""Beyond every `longest_s`; a power without a bound would not fit into a float after a thousand failures."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that begin with `first_s`, double, and end at `longest_s`; each times a random factor within `jitter`."""

    first_s: float
    longest_s: float
    jitter: tuple[float, float] = (1.0, 1.0)
    """Smallest and largest factor; the largest pause is `longest_s` times the latter."""

    def pause_s(self, num_failures: int, uniform: Callable[[float, float], float] = random.uniform) -> float:
        """Seconds to wait after `num_failures` failures in a row, 1 or more. `uniform(low, high)` draws the factor."""
        doublings = min(num_failures - 1, _MAX_DOUBLINGS)
        return min(self.first_s * 2.0**doublings, self.longest_s) * uniform(*self.jitter)
