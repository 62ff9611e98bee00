"""`python -m tests.support.nursery_process inference|orchestrator|trainer`: see `nursery.py`."""

import ctypes
import importlib
import json
import os
import random
import select
import signal
import sys
from pathlib import Path

from runtime.process.service import Main, run_main

CLONE_NEWNET = 0x40000000
PRELOADED = {
    "inference": ("inference.service", "inference.torch_engine.loading", "transformers.models.qwen3.modeling_qwen3"),
    "orchestrator": ("orchestrator.service", "orchestrator.envs.verifiers.loading", "copy_text", "tandem_harness"),
    "trainer": ("trainer.service", "transformers.models.qwen3.modeling_qwen3", "torch.distributed.checkpoint"),
}


def main(service: str) -> None:
    """Serve until stdin ends, then end the children."""
    cli = importlib.import_module(f"{service}.cli")
    for module in PRELOADED[service]:
        importlib.import_module(module)
    wake, wakened = os.pipe()
    os.set_blocking(wakened, False)
    signal.set_wakeup_fd(wakened)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    living: set[int] = set()
    ended: set[int] = set()
    print(json.dumps({"ready": service}), flush=True)
    while True:
        ready, _, _ = select.select([sys.stdin, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
        report_ended(living, ended)
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                break
            reap(ended)
            living.add(give_birth(service, cli.run, **json.loads(line)))
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)  # taking torch down takes seconds


def give_birth(
    service: str, run: Main, argv: list[str], output: str, cwd: str, settings: dict[str, str], netns: str | None
) -> int:
    """Fork a child that is the service from its entry point on; its pid."""
    pid = os.fork()
    if pid:
        print(json.dumps({"pid": pid}), flush=True)
        return pid
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    random.seed()
    os.setsid()
    os.chdir(cwd)
    os.environ.update(settings)
    if netns is not None:
        enter_network(netns)
    log = os.open(Path(output), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    run_main(service, run, argv)


def enter_network(namespace: str) -> None:
    """As `ip netns exec` does."""
    with Path("/run/netns", namespace).open() as file:
        assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0


def report_ended(living: set[int], ended: set[int]) -> None:
    """Tell of children that died. They stay zombies until `reap`, so that nobody else gets their pid meanwhile."""
    for pid in tuple(living):
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is not None:
            code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
            print(json.dumps({"pid": pid, "code": code}), flush=True)
            living.remove(pid)
            ended.add(pid)


def reap(ended: set[int]) -> None:
    """Let go of the dead."""
    for pid in tuple(ended):
        os.waitpid(pid, 0)
        ended.remove(pid)


if __name__ == "__main__":
    main(sys.argv[1])
