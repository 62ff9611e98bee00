"""What can go wrong while a tiny model is made.

TinyModelError
├── FolderTaken       the output folder holds something else
└── WarmStartFailed   the target was not reached within the allowed steps
"""


class TinyModelError(Exception):
    """Base of this package's errors; the message is for the user."""


class FolderTaken(TinyModelError):
    """The output folder exists and is not the model that was asked for."""


class WarmStartFailed(TinyModelError):
    """Supervised steps ran out before the sampled exact match reached its target."""
