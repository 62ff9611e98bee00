"""What a step frees, the next one gets without asking the kernel: counted in page faults, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.errors import UserError
from trainer import service
from trainer.config import ModelConfig, TrainerConfig

PROGRAM = """
import resource, sys, threading
from trainer.kept_memory import keep_freed_memory

def step():  # as libzmq does: in another thread, and much larger than what glibc keeps by itself
    pieces = [b"x" * 2**20 for _ in range(256)]

def faults(run):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

done = keep_freed_memory(on_gpu=sys.argv[1] == "gpu")
print(done, faults(step), faults(step))
"""


def run_twice(device: str, **environment: str) -> tuple[str, int, int]:
    """What `keep_freed_memory` said, and the faults of two equal steps after it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM, device]
    output = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=True).stdout
    done, first, second = output.split()
    return done, int(first), int(second)


def test_the_trainer_sees_to_it_before_it_starts_a_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Threads that are there keep allocators of their own, which give memory back."""
    done: list[str] = []
    monkeypatch.setattr(service, "keep_freed_memory", lambda **options: done.append("keep"))

    def start_threads(*arguments: object) -> None:
        done.append("threads")
        raise UserError("far enough")

    monkeypatch.setattr(service, "TrainerProcess", start_threads)
    with pytest.raises(UserError, match="far enough"):
        service.run_trainer(TrainerConfig(model=ModelConfig(path=tmp_path)))
    assert done == ["keep", "threads"]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_second_step_uses_the_memory_of_the_first(device: str) -> None:
    done, first, second = run_twice(device)
    assert done == "True"
    assert second < first / 10


def test_who_sets_malloc_up_in_the_environment_is_left_alone() -> None:
    done, first, second = run_twice("cpu", MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert done == "False"
    assert second > first / 2
