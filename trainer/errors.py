"""What can go wrong in the trainer.

    TrainerError
    ├── PlanError               a batch that cannot be trained: no sample, no trained token, a modality we do not train
    ├── BatchMismatch           fetched samples that are not the ones the plan was made from
    ├── ModelUnusable           (also a UserError) the model folder cannot be loaded or cannot be trained packed
    └── AttentionUnavailable    (also a UserError) the attention kernel asked for does not work here

The last two are the user's to mend: one line, exit code 2.
"""

from runtime.errors import UserError


class TrainerError(Exception):
    """Base of everything this package raises on purpose."""


class PlanError(TrainerError):
    """A batch that cannot be trained."""


class BatchMismatch(TrainerError):
    """Samples that contradict their manifest."""


class ModelUnusable(TrainerError, UserError):
    """A model that cannot be loaded, or that would train wrongly."""


class AttentionUnavailable(TrainerError, UserError):
    """An attention kernel that cannot run on this machine."""
