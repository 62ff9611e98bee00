"""What can go wrong in the trainer.

    TrainerError
    ├── PlanError               a batch that cannot be trained: no sample, no trained token, images for a model of text
    ├── BatchMismatch           fetched samples that are not the ones the plan was made from
    │   └── CriticMismatch      (also a UserError) a batch that was not made for a trainer with a critic
    ├── StopWaiting             a stop request ended a wait (never leaves the link that waits)
    ├── RankMismatch            ranks that must hold the same thing do not
    ├── CheckpointInvalid       a checkpoint that must not be loaded: partial, corrupt, or of another run
    ├── NonFiniteError          (exit code 77) loss or gradient were not finite too many steps in a row
    ├── LossInvalid             (also a UserError) a custom loss that is not found or breaks its contract
    ├── ModelUnusable           (also a UserError) the model folder cannot be loaded or cannot be trained packed
    └── AttentionUnavailable    (also a UserError) the attention kernel asked for does not work here

A UserError is the user's to mend: one line, exit code 2.
"""

from collections.abc import Sequence

from runtime.errors import ExitCode, ServiceError, UserError


class TrainerError(Exception):
    """Base of everything this package raises on purpose."""


class PlanError(TrainerError):
    """A batch that cannot be trained."""


class BatchMismatch(TrainerError):
    """Samples that contradict their manifest."""


class CriticMismatch(BatchMismatch, UserError):
    """A batch whose advantages are not the critic's to make: the settings of the two services contradict."""


class StopWaiting(TrainerError):
    """A stop was requested while waiting for a peer."""


class RankMismatch(TrainerError):
    """Ranks disagree on something that is a pure function of the same input."""

    def __init__(self, what: str, values: Sequence[str]) -> None:
        listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        super().__init__(f"ranks disagree on {what}: {listed}")


class CheckpointInvalid(TrainerError):
    """A folder that is not a usable checkpoint; the message is the reason."""


class NonFiniteError(TrainerError, ServiceError):
    """Training produces NaN or infinity and does not recover."""

    exit_code = ExitCode.NON_FINITE


class LossInvalid(TrainerError, UserError):
    """A loss of the user's own that cannot be used."""


class ModelUnusable(TrainerError, UserError):
    """A model that cannot be loaded, or that would train wrongly."""


class AttentionUnavailable(TrainerError, UserError):
    """An attention kernel that cannot run on this machine."""
