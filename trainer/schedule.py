"""The learning rate as a pure function of the step, so that a resumed run needs nothing but its step."""

import math

from trainer.config import ScheduleConfig


def learning_rate(step: int, peak: float, schedule: ScheduleConfig, max_steps: int | None) -> float:
    """The rate that step `step` (from 1) is taken with.

    Step `k` of the warm-up uses `k / (warmup_steps + 1)` of the peak; a decaying schedule reaches
    `min_lr_ratio * peak` at `max_steps` and stays there.
    """
    if step <= schedule.warmup_steps:
        return peak * step / (schedule.warmup_steps + 1)
    return peak * _decay(step, schedule, max_steps)


def _decay(step: int, schedule: ScheduleConfig, max_steps: int | None) -> float:
    if schedule.type == "constant":
        return 1.0
    assert max_steps is not None, "the config asks for it"
    span = max(max_steps - schedule.warmup_steps - 1, 1)
    passed = min((step - schedule.warmup_steps - 1) / span, 1.0)
    share = 1.0 - passed if schedule.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * passed))
    return schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * share
