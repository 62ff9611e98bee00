"""A child of a nursery is the service itself: it prints, fails and dies like one."""

from pathlib import Path

import pytest

from runtime.exit_codes import ExitCode
from tests.faults.exactly_once.fixed_run import FixedRun
from tests.support.nursery import Child, Nursery
from tests.support.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
DEADLINE_S = 60.0


def exit_code(child: Child) -> int | None:
    until(lambda: child.poll() is not None, DEADLINE_S)
    return child.poll()


def test_a_child_ends_with_the_exit_code_of_the_service(nurseries: dict[str, Nursery], tmp_path: Path) -> None:
    child = nurseries["trainer"].start(["--no-such-key", "1"], tmp_path / "out")
    assert exit_code(child) == ExitCode.USAGE
    assert "no-such-key" in (tmp_path / "out").read_text().replace("_", "-")


def test_a_killed_child_is_dead_and_others_live_on(
    nurseries: dict[str, Nursery], fixed_run: FixedRun, tmp_path: Path
) -> None:
    orchestrators = nurseries["orchestrator"]
    first, second = (
        orchestrators.start(fixed_run.below(tmp_path / name).orchestrator(), tmp_path / f"{name}.log")
        for name in ("first", "second")
    )
    first.kill()
    assert exit_code(first) == -9
    first.kill()  # a second time is harmless
    assert second.poll() is None
    second.kill()
    assert exit_code(second) == -9
