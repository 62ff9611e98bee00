"""What can go wrong while a tiny model is made.

TinyModelError
├── FolderTakenError   the output folder holds something else
└── WarmStartError     the target was not reached within the allowed steps
"""


class TinyModelError(Exception):
    """Base of this package's errors; the message is for the user."""


class FolderTakenError(TinyModelError):
    """The output folder exists and is not the model that was asked for."""


class WarmStartError(TinyModelError):
    """Supervised steps ran out before the sampled exact match reached its target."""
