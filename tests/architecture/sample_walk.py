"""How many of our files one training sample walks through, from the draw of its example to the optimizer step.

    python -m tests.architecture.sample_walk [--tree CHECKOUT]

It starts the three services of CHECKOUT (this one, unless told otherwise) on the copy task: single turn, direct driver,
embedded engine, one group per step, and no step ahead. Each service runs under `sys.setprofile` and notes the files of
ours in which a function is called while the sample is there:

    orchestrator   from the draw of an example until its samples are sent
    inference      while a generate request is handled
    trainer        from asking for a batch until the optimizer has stepped

A file counts if that is so in three steps of four. What runs by the clock does not count: heartbeats, and
tasks and threads of `runtime/` (health server, watchdog, lag of the loop). All else is as by default: no token export.
"""

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

SERVICES = ("inference", "orchestrator", "trainer")
PACKAGES = ("chat", "inference", "orchestrator", "runtime", "trainer", "transport")
NUM_STEPS = 8
EVENT_LOOP = re.compile(r"/(asyncio/(?!threads)|uvloop/)")
EXECUTOR = re.compile(r"/concurrent/futures/|/asyncio/threads")
DEADLINE_S = 300.0

Mark = Callable[[FrameType, str, str], bool]
"""Whether a call (frame, file, function) is the one that opens or closes a window."""


def is_generate(frame: FrameType, file: str, function: str) -> bool:
    """A handler or a middleware of the HTTP server looks at a generate request."""
    return str(getattr(frame.f_locals.get("request"), "path", "")).endswith("/generate")


def is_other_request(frame: FrameType, file: str, function: str) -> bool:
    """The same, of any other request."""
    request = frame.f_locals.get("request")
    return hasattr(request, "path") and not is_generate(frame, file, function)


def is_called(name: str, file_name: str) -> Mark:
    """A function by its name, and the end of its file's name. These names are the same in all layouts so far."""
    return lambda frame, file, function: function == name and file.endswith(file_name)


class After:
    """`mark`, but only the first time after `before`."""

    def __init__(self, before: Mark, mark: Mark) -> None:
        self._before, self._mark = before, mark
        self._is_due = False

    def __call__(self, frame: FrameType, file: str, function: str) -> bool:
        self._is_due = self._is_due or self._before(frame, file, function)
        if not (self._is_due and self._mark(frame, file, function)):
            return False
        self._is_due = False
        return True


MARKS: dict[str, tuple[Mark, Mark]] = {
    # The scheduler draws the next example right after it has dispatched one: `visit` is in the window, too.
    "orchestrator": (
        is_called("_dispatch", "scheduler.py"),
        After(is_called("_get_samples", ".py"), is_called("_record", ".py")),
    ),
    "inference": (is_generate, is_other_request),
    "trainer": (is_called("_next", "inbox.py"), is_called("_guarded_step", "step.py")),
}


class Recorder:
    """The files called in each window of one service."""

    def __init__(self, service: str, tree: Path) -> None:
        self._opens, self._closes = MARKS[service]
        self._prefixes = tuple(f"{tree / package}{os.sep}" for package in PACKAGES)
        self._runtime = f"{tree / 'runtime'}{os.sep}"
        self._tree = tree
        self._open: set[str] | None = None
        self.windows: list[list[str]] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """What `sys.setprofile` calls."""
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if event != "call" or function == "<module>" or not file.startswith(self._prefixes):
            return
        if file.startswith(self._runtime) and self._runs_by_itself(frame):
            return
        if self._open is None and self._opens(frame, file, function):
            self._open = set()
        elif self._open is not None and self._closes(frame, file, function):
            self.windows.append(sorted(self._open))
            self._open = None
        if self._open is not None:
            self._open.add(str(Path(file).relative_to(self._tree)))

    def _runs_by_itself(self, frame: FrameType) -> bool:
        """Whether the event loop, or a thread of its own, runs this call of `runtime/`: no other code of ours asked."""
        caller = frame.f_back
        while caller is not None and not EVENT_LOOP.search(file := caller.f_code.co_filename):
            if EXECUTOR.search(file) or (file.startswith(self._prefixes) and not file.startswith(self._runtime)):
                return False
            caller = caller.f_back
        return True


def record(service: str, tree: Path, out: Path, arguments: list[str]) -> None:
    """Run one service in this process as `python -m SERVICE` does, and write its windows to `out`."""
    recorder = Recorder(service, tree)
    sys.argv = [service, *arguments]
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        runpy.run_module(service, run_name="__main__", alter_sys=True)
    finally:
        sys.setprofile(None)
        out.write_text(json.dumps(recorder.windows))


def start(service: str, tree: Path, folder: Path, flags: list[str]) -> "subprocess.Popen[bytes]":
    """One recorded service in a process of its own."""
    command = [sys.executable, __file__, "--tree", str(tree), "--record", service, "--out", str(folder / service)]
    log = (folder / f"{service}.log").open("wb")
    return subprocess.Popen([*command, "--", *flags], cwd=tree, env=environment(tree), stdout=log, stderr=log)


def environment(tree: Path) -> dict[str, str]:
    """The code of `tree` first, whatever is installed."""
    paths = os.pathsep.join((str(tree), str(tree / "examples")))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(tree: Path, folder: Path) -> dict[str, list[str]]:
    """The files of each service through which every sample went."""
    model = folder / "model"
    make_model = [sys.executable, "-m", "tiny_models", "--task", "copy-text", "--warm-start", "0.5"]
    make_model += ["--out", str(model)]
    subprocess.run(make_model, cwd=tree, env=environment(tree), check=True, timeout=DEADLINE_S)
    config = tree / "configs" / "copy_text"
    without_export = (config / "trainer.toml").read_text().partition("[token_export]")[0]
    (folder / "trainer.toml").write_text(without_export)
    same = ["--run.dir", str(folder / "runs"), "--run.name", "walk", "--model.path", str(model)]
    same += ["--admin-token-file", str(folder / "admin.token")]
    engine, server = "8417", "tcp://127.0.0.1:8418"
    steps = ["--max-steps", str(NUM_STEPS), "--health.port", "0"]
    processes = [
        start("inference", tree, folder, ["@", f"{config}/inference.toml", *same, "--server.port", engine]),
        start(
            "orchestrator", tree, folder,
            ["@", f"{config}/orchestrator.toml", *same, *steps, "--server.endpoint", server, "--batch-size", "8",
             "--max-staleness", "0", "--max-in-flight", "8", "--engines.urls", f'["http://127.0.0.1:{engine}"]'],
        ),
        start(
            "trainer", tree, folder,
            ["@", f"{folder}/trainer.toml", *same[:-2], *steps, "--orchestrator.endpoint", server],
        ),
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + DEADLINE_S
        for process in processes[1:]:
            if process.wait(deadline - time.monotonic()) != 0:
                raise SystemExit("\n".join((folder / f"{name}.log").read_text()[-2000:] for name in SERVICES))
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
    return {service: in_most_windows(json.loads((folder / service).read_text())) for service in SERVICES}


def in_most_windows(windows: list[list[str]]) -> list[str]:
    """Files of three windows in four, the first one left out: things that stay are made in it."""
    assert len(windows) > NUM_STEPS / 2, f"only {len(windows)} windows were seen"
    counts = Counter(file for window in windows[1:] for file in window)
    return sorted(file for file, count in counts.items() if count >= 0.75 * (len(windows) - 1))


def main() -> None:
    """Print each service's files, and how many there are in all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--record", choices=SERVICES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    tree = given.tree.resolve()
    if given.record:
        return record(given.record, tree, given.out, given.arguments)
    with tempfile.TemporaryDirectory() as folder:
        walked = run(tree, Path(folder))
    for service, files in walked.items():
        print(f"{service}: {len(files)}", *files, sep="\n  ")
    print(f"in all: {len(set().union(*walked.values()))} files")


if __name__ == "__main__":
    main()
