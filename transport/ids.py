"""Names for numbers that must not be mixed up.

Steps count from 1, policy versions from 0: batch `N` trains version `N - 1` into version `N`.
"""

from typing import NewType

Step = NewType("Step", int)
PolicyVersion = NewType("PolicyVersion", int)


def version_before(step: Step) -> PolicyVersion:
    """The policy version that batch `step` trains."""
    return PolicyVersion(step - 1)


def version_after(step: Step) -> PolicyVersion:
    """The policy version that training batch `step` makes."""
    return PolicyVersion(step)
