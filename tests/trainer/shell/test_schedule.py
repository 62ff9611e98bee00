import pytest

from trainer.config.model import ScheduleConfig
from trainer.optimizer import learning_rate


def rates(schedule: ScheduleConfig, max_steps: int | None, num_steps: int) -> list[float]:
    return [learning_rate(step, 1.0, schedule, max_steps) for step in range(1, num_steps + 1)]


def test_constant_schedule_is_the_peak_from_the_first_step():
    assert rates(ScheduleConfig(), None, 3) == [1.0, 1.0, 1.0]


def test_warm_up_rises_in_equal_parts_and_never_trains_with_zero():
    assert rates(ScheduleConfig(warmup_steps=3), None, 5) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_linear_schedule_falls_from_the_peak_to_the_floor_at_the_last_step():
    found = rates(ScheduleConfig(type="linear", min_lr_ratio=0.2), 5, 5)
    assert found == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_schedule_has_half_of_its_fall_in_the_middle():
    found = rates(ScheduleConfig(type="cosine", warmup_steps=1), 6, 6)
    assert found[:2] == pytest.approx([0.5, 1.0])
    assert found[3] == pytest.approx(0.5)
    assert found[5] == pytest.approx(0.0)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_decayed_rate_stays_at_the_floor_beyond_the_end(kind):
    schedule = ScheduleConfig(type=kind, min_lr_ratio=0.1)
    assert learning_rate(50, 2.0, schedule, 10) == pytest.approx(0.2)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_one_step_runs_do_not_divide_by_zero(kind):
    assert learning_rate(1, 1.0, ScheduleConfig(type=kind), 1) == 1.0
