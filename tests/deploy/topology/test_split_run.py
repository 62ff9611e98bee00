"""The topology of docker-compose.yml as real processes on machines of their own: addresses, keys on both links, no disk
in common, weights over ZeroMQ. Every machine is cut off or killed once; nothing is lost, nothing trained twice."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.topology.machines import Machine, Node, last_step, stop_all
from tests.support.nursery import ROOT, environment
from transport.security.keys import make_keys

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
MAX_STEPS = 16


class SplitRun:
    """Three machines that share nothing but the network, the model and their own keys."""

    def __init__(self, nodes: dict[str, Node], folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model
        self.machines = {name: Machine(nodes[name], folder / name) for name in ("inference", "orchestrator", "trainer")}
        make_keys(folder / "batches")
        make_keys(folder / "weights")
        (folder / "admin.token").write_text("a token of this test")
        (folder / "admin.token").chmod(0o600)

    def run_dir(self, name: str) -> Path:
        return self._folder / name / "runs" / "copy-text"

    def start(self, name: str) -> None:
        machine = self.machines[name]
        flags = ["--run.dir", str(machine.disk / "runs"), "--model.path", str(self._model)]
        flags += ["--health.host", machine.node.address, "--health.port", "9100"]
        config = ROOT / "configs" / "copy_text" / f"{name}.toml"
        machine.start(name, "@", str(config), *flags, *self._links(name), warm=True)

    def _links(self, name: str) -> list[str]:
        address = {other: machine.node.address for other, machine in self.machines.items()}
        keys, token = self._folder, ["--admin-token-file", str(self._folder / "admin.token")]
        return {
            "inference": [*token, "--server.host", address[name], "--weights.keys-dir", f"{keys}/weights"],
            "orchestrator": [
                *token,
                *("--engines.urls", f"http://{address['inference']}:8000", "--max-steps", str(MAX_STEPS)),
                *("--server.endpoint", f"tcp://{address[name]}:29600", "--server.keys-dir", f"{keys}/batches"),
                *("--batch-size", "32"),
            ],
            "trainer": [
                *("--orchestrator.endpoint", f"tcp://{address['orchestrator']}:29600"),
                *("--orchestrator.keys-dir", f"{keys}/batches", "--weights.channel", "zmq"),
                *("--weights.host", address[name], "--weights.keys-dir", f"{keys}/weights"),
                *("--checkpoint.interval-steps", "2"),
            ],
        }[name]

    def health(self, name: str, port: int = 9100) -> dict[str, object]:
        """What a health endpoint of the machine says, asked from the machine itself."""
        node = self.machines[name].node
        code = f"from runtime.health.health import ask_health as f; import json; print(json.dumps(f('http://{node.address}:{port}/health')[0]))"
        command = node.command([sys.executable, "-c", code])
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        report: dict[str, object] = json.loads(done.stdout) if done.returncode == 0 else {}
        return report

    def until_trained(self, step: int) -> None:
        done = self.run_dir("trainer")
        self.machines["trainer"].until(lambda: last_step(done, "trainer") >= step)


@pytest.fixture
def split_run(nodes: dict[str, Node], tmp_path: Path, copy_model: Path) -> Iterator[SplitRun]:
    run = SplitRun(nodes, tmp_path, copy_model)
    try:
        for name in run.machines:
            run.start(name)
        yield run
    finally:
        stop_all(list(run.machines.values()))


def test_partition_kills_and_preemption_of_every_machine_lose_nothing(split_run: SplitRun) -> None:
    machines = split_run.machines
    split_run.until_trained(2)

    machines["trainer"].node.cut_off()
    machines["orchestrator"].until(lambda: split_run.health("orchestrator").get("silent_ranks") == 1)
    machines["trainer"].node.heal()
    split_run.until_trained(4)

    machines["inference"].kill()
    split_run.start("inference")
    split_run.until_trained(last_step(split_run.run_dir("trainer"), "trainer") + 3)

    machines["orchestrator"].kill()
    split_run.start("orchestrator")
    split_run.until_trained(last_step(split_run.run_dir("trainer"), "trainer") + 2)

    assert machines["trainer"].preempt() == 0, machines["trainer"].output
    split_run.start("trainer")

    assert machines["trainer"].wait() == 0, machines["trainer"].output
    assert machines["orchestrator"].wait() == 0, machines["orchestrator"].output
    assert split_run.health("inference", port=8000)["version"] == MAX_STEPS, "the engine has the last version"
    assert machines["inference"].preempt() == 0, machines["inference"].output
    check_that_nothing_is_lost(split_run)


def check_that_nothing_is_lost(run: SplitRun) -> None:
    newest = json.loads((run.run_dir("trainer") / "checkpoints" / "newest.json").read_text())
    assert newest == {"step": MAX_STEPS}
    command = [sys.executable, "-m", "orchestrator", "ledger", str(run.run_dir("orchestrator"))]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list((run.run_dir("inference") / "weights").iterdir()), "no weights were written to the engine's disk"
    assert not list((run.run_dir("trainer") / "weights").iterdir()), "nor to the trainer's"
