import msgspec
import pytest

from trainer.step.report import StepReport, TrainProgress


def report(*, stepped: bool = True) -> StepReport:
    metrics = {"samples/global": 3.0, "tokens/global": 10.0}
    return StepReport(stepped, metrics)


def test_progress_adds_up_over_optimizer_steps_and_batches():
    progress = TrainProgress().after(1, [report(), report()]).after(2, [report()])
    assert progress == TrainProgress(step=2, num_samples=9, num_tokens=30)


@pytest.mark.parametrize("step", [1, 3])
def test_a_batch_out_of_order_is_refused(step):
    with pytest.raises(ValueError, match=f"batch {step} does not follow step 1"):
        TrainProgress(step=1).after(step, [report()])


def test_non_finite_steps_are_counted_in_a_row():
    bad = TrainProgress().after(1, [report(stepped=False)]).after(2, [report(), report(stepped=False)])
    assert bad.num_non_finite == 2
    assert bad.after(3, [report()]).num_non_finite == 0


def test_progress_survives_a_round_trip_through_json():
    progress = TrainProgress(step=7, num_samples=2, num_tokens=3, num_non_finite=1)
    assert msgspec.json.decode(msgspec.json.encode(progress), type=TrainProgress) == progress
