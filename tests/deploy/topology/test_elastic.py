"""torchrun elastic over two machines: one dies, comes back, and training goes on from the last checkpoint."""

import json
from pathlib import Path

import pytest

from tests.deploy.topology.machines import Machine, Node, last_step, steps, stop_all

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
MAX_STEPS = 12


def start(machine: Machine, first: Node, model: Path, runs: Path) -> None:
    torchrun = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "20"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:29400", "--rdzv-id", "elastic"]
    # In a namespace the machine's name does not lead to its address: torchrun must be told where the meeting point is.
    torchrun += ["--rdzv-conf", f"is_host={machine.node == first}".lower()]
    torchrun += ["--local-addr", machine.node.address, "-m", "trainer"]
    data = ["--data.fake.batch-size", "64", "--data.fake.mean-tokens", "40", "--max-steps", str(MAX_STEPS)]
    where = ["--run.dir", str(runs), "--run.name", "elastic", "--model.path", str(model), "--model.seq-len", "256"]
    rest = ["--checkpoint.interval-steps", "1", "--health.port", "0", "--no-metrics.tensorboard"]
    machine.start(*torchrun, *where, *data, *rest)


def test_a_machine_that_dies_comes_back_and_training_goes_on(
    nodes: dict[str, Node], tmp_path: Path, copy_model: Path
) -> None:
    first, second = (Machine(nodes[name], tmp_path / name) for name in ("trainer", "trainer-2"))
    runs = tmp_path / "shared"  # ranks of one trainer share the disk of their checkpoints
    run_dir = runs / "elastic"
    try:
        for machine in (first, second):
            start(machine, first.node, copy_model, runs)
        first.until(lambda: last_step(run_dir, "trainer") >= 3)
        second.kill()
        start(second, first.node, copy_model, runs)
        died_at = last_step(run_dir, "trainer")
        assert died_at < MAX_STEPS, "the run was over before the machine died: make it longer"
        assert first.wait() == 0, first.output
        assert second.wait() == 0, second.output
    finally:
        stop_all([first, second])
    assert json.loads((run_dir / "checkpoints" / "newest.json").read_text()) == {"step": MAX_STEPS}
    assert sorted(set(steps(run_dir, "trainer"))) == list(range(1, MAX_STEPS + 1))
