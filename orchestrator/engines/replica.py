"""`Replica`: one engine of a pool, how busy it is, and whether it is worth trying."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

FIRST_REST_S = 0.5
LONGEST_REST_S = 10.0


@dataclass(slots=True)
class Replica:
    """A base URL. After failures in a row it rests, longer each time, while others are ready."""

    url: str
    num_in_flight: int = 0
    num_failures: int = 0
    """Failures since the last success."""
    rests_until: float = 0.0
    vocab_size: int = 0
    """As the engine's health endpoint says."""

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count a request while it is in flight."""
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1

    def succeeded(self) -> None:
        """It answered."""
        self.num_failures = 0
        self.rests_until = 0.0

    def failed(self, now: float) -> None:
        """It did not answer."""
        self.rests_until = now + min(FIRST_REST_S * 2**self.num_failures, LONGEST_REST_S)
        self.num_failures += 1


def least_loaded(replicas: Sequence[Replica], now: float) -> Replica:
    """The replica with the least in flight among those that do not rest; among all, if all rest."""
    ready = [replica for replica in replicas if replica.rests_until <= now]
    return min(ready or replicas, key=lambda replica: replica.num_in_flight)
