"""`StepReport`: the outcome of an optimizer step. `TrainProgress`: how far the run is, part of every checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from trainer.accounting import Accounting, EnvTotals


class TrainProgress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batches `1..step` have been trained, exactly once each."""

    step: int = 0
    """Last trained batch; also the policy version that the model is."""
    num_samples: int = 0
    """Samples trained so far, over all ranks."""
    num_tokens: int = 0
    """Tokens trained so far, over all ranks, padding excluded."""
    num_non_finite: int = 0
    """Batches in a row, up to now, of which an optimizer step was skipped because it was not finite."""

    def after(self, step: int, reports: "Sequence[StepReport]") -> "TrainProgress":
        """Progress after batch `step`, which must be the next one."""
        if step != self.step + 1:
            raise ValueError(f"batch {step} does not follow step {self.step}")
        finite = all(report.stepped for report in reports)
        return TrainProgress(
            step=step,
            num_samples=self.num_samples + sum(report.accounting.num_samples for report in reports),
            num_tokens=self.num_tokens + sum(report.accounting.num_tokens for report in reports),
            num_non_finite=0 if finite else self.num_non_finite + 1,
        )


@dataclass(frozen=True)
class StepReport:
    """The outcome, equal on all ranks but for the `*/local` metrics."""

    stepped: bool
    """False: the loss or the gradient was not finite on some rank, and no rank changed a weight."""
    metrics: dict[str, float]
    """By the names of the metrics contract, `loss` and `grad_norm` (before clipping) included."""
    accounting: Accounting
    """What all ranks trained together."""
    env_totals: EnvTotals | None = None
    """What the metrics by env were made from."""
