"""Names of examples that stay the same over restarts."""

import re
from collections.abc import Sequence

_SAFE = re.compile(r"[A-Za-z0-9._-]{1,128}")


def example_ids(given: Sequence[str | None]) -> list[str]:
    """The environment's own ids if every example has one, all differ and fit into a group id; else their positions."""
    own = [name for name in given if name is not None and _SAFE.fullmatch(name)]
    if len(own) == len(given) and len(set(own)) == len(own):
        return own
    return [str(position) for position in range(len(given))]
