"""Row 12: the disk fills up under a run of real services."""

from pathlib import Path

import pytest

from runtime.errors import ExitCode
from tests.faults.exactly_once.fixed_run import FixedRun
from tests.faults.exactly_once.signs import Result, check_ledger, result_of, steps_of
from tests.faults.storage.services import Services
from tests.faults.storage.small_disk import SmallDisk, check_whole, valid_checkpoints

pytestmark = pytest.mark.integration
REFUSED = {"orchestrator": "is not stored yet", "trainer": "failed (1 of"}
"""What a service says when the disk refuses what it cannot do without."""
DISPENSABLE = {
    "metrics": "jsonl metrics cannot be written",
    "rollouts": "rollouts are not saved",
    "logs": "cannot write",
}
"""Folders that a run can do without, and what a service says then."""


def is_under_way(run: FixedRun) -> bool:
    return any(step >= 3 for step, _ in steps_of(run.path / "outbox", "step-*.batch"))


def has_warned(services: Services) -> bool:
    return any(warning in services.output(service) for service, warning in REFUSED.items())


def test_a_disk_that_is_freed_in_time_costs_the_run_nothing_but_time(
    fixed_run: FixedRun, reference: Result, disk: SmallDisk, services: Services
) -> None:
    run = fixed_run.below(disk.path)
    services.start_both(run)
    services.until(lambda: is_under_way(run))
    services.until(lambda: disk.fill() or has_warned(services))
    check_whole(run.path)
    disk.empty()
    assert services.wait_both() == (0, 0)
    check_whole(run.path)
    check_ledger(run.path, run.max_steps)
    assert result_of(run.path, run.max_steps) == reference


def test_metrics_logs_and_rollouts_that_cannot_be_written_cost_one_warning_each(
    fixed_run: FixedRun, reference: Result, disk: SmallDisk, services: Services, tmp_path: Path
) -> None:
    run = fixed_run.below(tmp_path / "runs")
    run.path.mkdir(parents=True)
    for name in DISPENSABLE:
        (disk.path / name).mkdir()
        (run.path / name).symlink_to(disk.path / name)
    disk.fill()
    services.start_both(run)
    assert services.wait_both() == (0, 0)
    assert result_of(run.path, run.max_steps) == reference
    warned = {name: services.output("orchestrator").count(text) for name, text in DISPENSABLE.items()}
    assert warned == {"metrics": 1, "rollouts": 1, "logs": 1}
    assert services.output("trainer").count(DISPENSABLE["metrics"]) == 1


def test_a_disk_that_stays_full_ends_the_run_with_74_and_it_goes_on_when_there_is_room(
    fixed_run: FixedRun, reference: Result, disk: SmallDisk, services: Services
) -> None:
    run = fixed_run.below(disk.path)
    services.start_both(run)
    services.until(lambda: is_under_way(run))
    services.until(lambda: disk.fill() or any(map(services.exit_code, REFUSED)))
    ended = [service for service in REFUSED if services.exit_code(service) is not None]
    for service in ended:
        assert services.exit_code(service) == ExitCode.STORAGE, services.output(service)
        assert "No space left on device" in services.output(service).splitlines()[-1]
        assert "Traceback" not in services.output(service)
    check_whole(run.path)
    for service in set(REFUSED) - set(ended):
        services.kill(service)

    services.start(ended[0], run.orchestrator() if ended[0] == "orchestrator" else run.trainer())
    assert services.wait(ended[0]) == ExitCode.STORAGE, "a start on a full disk is the same trouble"
    disk.empty()
    services.start_both(run)
    assert services.wait_both() == (0, 0), services.output("orchestrator") + services.output("trainer")
    check_ledger(run.path, run.max_steps)
    assert result_of(run.path, run.max_steps) == reference
    assert valid_checkpoints(run.path)[-1] == run.max_steps
