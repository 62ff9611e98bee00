"""Real processes, real kill -9: whatever `put` promised is there afterwards, byte for byte."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.transport.samples import RUN, make_batch
from transport.outbox.outbox import Outbox

NUM_KILLS = 10


def run_and_kill(directory: Path, num_lines: int, then_s: float) -> dict[str, int]:
    """Kill a writer `then_s` after it printed `num_lines`; returns the last step it printed for each kind of event."""
    command = [sys.executable, "-m", "tests.transport.writer", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(num_lines)]
    time.sleep(then_s)  # the instant of the kill, not a wait for anything
    process.kill()
    lines += process.stdout.readlines()
    process.stdout.close()
    process.wait()
    return {line.split()[0]: int(line.split()[1]) for line in lines if line.endswith("\n")}


@pytest.mark.integration
def test_nothing_that_was_promised_is_lost_by_kill_9(tmp_path: Path) -> None:
    instants = random.Random(7)
    promised = {"put": 0, "trained": 0, "committed": 0}
    for _ in range(NUM_KILLS):
        # From the eighth line on there is a commit among them, however slow the machine is.
        printed = run_and_kill(tmp_path, instants.randrange(1, 12), instants.uniform(0.0, 0.02))
        assert printed.pop("open") > promised["put"]
        promised |= printed
        outbox = Outbox(tmp_path, RUN)
        assert outbox.next_step - 1 in (promised["put"], promised["put"] + 1)
        assert outbox.progress.last_trained >= promised["trained"]
        assert outbox.progress.last_committed >= promised["committed"]
        assert not list(tmp_path.glob("*.tmp"))
        for step in outbox.steps():
            expected = make_batch(step, num_samples=4, num_tokens=2000)
            assert outbox.frames(step, range(4)) == list(expected.frames)
    assert promised["committed"] > 0
