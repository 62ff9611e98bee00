"""Seeds and permutations that depend on their arguments alone: not on time, process, platform or library version."""

import numpy as np
import numpy.typing as npt
import xxhash

_SEED_BITS = 48
"""Small enough to survive JSON numbers and `seed + turn`."""


def stable_hash(*parts: str | int) -> int:
    """64 bits that depend on the parts and on their borders."""
    return xxhash.xxh3_64_intdigest("\x1f".join(map(str, parts)).encode())


def rollout_seed(seed: int, env_name: str, example_id: str, attempt: int, index: int) -> int:
    """Seed of one rollout: a rollout that is generated again after a crash samples the same tokens."""
    return stable_hash("rollout", seed, env_name, example_id, attempt, index) >> (64 - _SEED_BITS)


def retry_seed(seed: int, num_tries: int) -> int:
    """Seed of the try after `num_tries` failed ones: what failed once with the same tokens would fail again."""
    return stable_hash("retry", seed, num_tries) >> (64 - _SEED_BITS)


def permutation(size: int, *key: str | int) -> npt.NDArray[np.int64]:
    """A permutation of `range(size)` drawn by `key`: sorts the indices by their splitmix64 hash."""
    return np.argsort(_words(size, *key), kind="stable")


def uniforms(size: int, *key: str | int) -> npt.NDArray[np.float64]:
    """Numbers in (0, 1) drawn by `key`."""
    return ((_words(size, *key) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _words(size: int, *key: str | int) -> npt.NDArray[np.uint64]:
    words = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stable_hash(*key))
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
