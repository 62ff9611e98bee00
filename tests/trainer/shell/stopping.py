"""A stop request that comes from a test instead of a signal."""

from collections.abc import Callable


class Stop:
    """In the place of a `Shutdown`: made by `request`, or as soon as `condition` says so."""

    def __init__(self, condition: Callable[[], bool] = lambda: False) -> None:
        self._condition = condition
        self._was_made = False

    @property
    def requested(self) -> bool:
        return self._was_made or self._condition()

    def request(self) -> None:
        self._was_made = True
