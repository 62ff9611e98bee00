"""Random numbers as a pure function of `(seed, index)`: no generator state, so batch company cannot change a draw."""

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BITS = 48
"""Resolution of a draw. Below 53, so that `u * total < total` holds in float64 for every `u < 1`."""

UInt64s = npt.NDArray[np.uint64]


def uniforms(seeds: UInt64s, indices: UInt64s) -> npt.NDArray[np.float64]:
    """Draw number `indices[i]` of the stream `seeds[i]`, in [0, 1)."""
    bits = _mix(_mix(seeds + _GOLDEN) + indices * _GOLDEN)
    return (bits >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS


def stream_seed(base: int, number: int) -> int:
    """Seed of the `number`-th request that brought none, for a server with seed `base`."""
    mixed = _mix(np.array([base], dtype=np.uint64) + _GOLDEN) ^ np.array([number], dtype=np.uint64)
    return int(_mix(mixed)[0])


def _mix(x: UInt64s) -> UInt64s:
    """The SplitMix64 finaliser: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
