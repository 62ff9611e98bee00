"""`rl view` and `rl report` as they are called, and what a terminal is shown."""

import argparse
import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from runtime.cli import find_command
from runtime.cli import run as rl
from runtime.errors import UserError
from tests.viewer.generated_run import Shape, make_run
from viewer.cli import open_run, report, view
from viewer.index.run import Run
from viewer.views.terminal import plain, show

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from runtime.cli import run; sys.exit(run(sys.argv[1:]))"
NOTHING = argparse.Namespace(step=None, group=None, rollout=None)


@pytest.fixture(autouse=True)
def cache_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def environment() -> dict[str, str]:
    """This checkout comes first, wherever the tests are started."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def shown(run: Run, arguments: argparse.Namespace = NOTHING) -> str:
    out = io.StringIO()
    assert show(run, Console(file=out, width=160, highlight=False), arguments) == 0
    return out.getvalue()


def test_rl_finds_the_commands() -> None:
    assert find_command("view") is view
    assert find_command("report") is report
    assert find_command("nothing") is None


def test_report_is_written_into_the_run_unless_another_file_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(num_steps=2))
    assert rl(["report", str(run)]) == 0
    assert rl(["report", str(run), str(run), "--out", str(tmp_path / "deep" / "both.html")]) == 0
    assert (run / "report" / "report.html").stat().st_size < (tmp_path / "deep" / "both.html").stat().st_size


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "::", "some-host"])
def test_an_address_that_others_reach_needs_a_token(run_path: Path, host: str) -> None:
    with pytest.raises(UserError, match="token-file"):
        view([str(run_path), "--host", host])


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run directory"):
        view([str(tmp_path), "--terminal"])


def test_three_runs_are_too_many(run_path: Path) -> None:
    with pytest.raises(UserError, match="at most 2"):
        view([str(run_path)] * 3)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [("view", ["--port", "65536"]), ("view", ["--port", "-1"])]
    + [("report", ["--max-mb", megabytes]) for megabytes in ("nan", "inf", "-1", "x")],
)
def test_numbers_out_of_range_are_wrong_usage(
    run_path: Path, command: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        rl([command, str(run_path), *arguments])
    assert ended.value.code == 2
    assert f"got '{arguments[1]}'" in capsys.readouterr().err


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", Shape(num_steps=2))
    (path / "rollouts" / "step-00000009.jsonl").mkdir()  # cannot be read as a file, whoever asks
    with pytest.raises(UserError, match=r"the files of the run cannot be read: .*step-00000009"):
        open_run(path)


def test_terminal_says_that_a_step_has_no_groups(generated: Run) -> None:
    with pytest.raises(UserError, match="no group of step 0 is recorded"):
        shown(generated, argparse.Namespace(step=0, group=None, rollout=None))


def test_terminal_shows_steps_a_group_and_a_rollout(generated: Run) -> None:
    text = shown(generated)
    for part in ("generated", "reward 0.250 → 0.750", "filtered", "question", "advantage", "push", "micro batch"):
        assert part in text


def test_terminal_shows_what_was_asked_for(generated: Run) -> None:
    assert "maths/example-0/3" in shown(generated, argparse.Namespace(step=3, group=None, rollout=None))
    group = shown(generated, argparse.Namespace(step=None, group="maths/example-0/3", rollout=None))
    assert "took <60 s>" in group
    assert "exact" not in group
    assert "question 0" in shown(generated, argparse.Namespace(step=None, group=None, rollout="3.0"))


def test_terminal_is_never_sent_control_characters(tmp_path: Path) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eabc[bold]\r"
    with closing(Run(make_run(tmp_path / "run", Shape(num_steps=1, answer=hostile, envs=(hostile,))), None)) as run:
        text = shown(run)
    assert not set("\x1b\x07\x9b\u202e\r") & set(text)
    assert "\\x1b" in text
    assert "[bold]" in text


def test_plain_keeps_text() -> None:
    assert plain("naïve\n\t日本 👍") == "naïve\n\t日本 👍"


def test_a_run_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "runs" / "mine", Shape(num_steps=1))
    monkeypatch.chdir(tmp_path)
    with closing(open_run(Path("mine"))) as run:
        assert run.name == "mine"


@pytest.mark.integration
def test_terminal_answers_what_is_typed(run_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, "view", str(run_path), "--terminal"]
    terminal = environment() | {"TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=terminal)
    os.close(theirs)
    try:
        os.write(ours, b"g 3\no maths/example-0/3\nr nonsense\nq\n")
        text = read_to_end(ours)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    for part in ("maths/example-2/3", "took <60 s>", "must be 2 numbers"):
        assert part in text


def read_to_end(descriptor: int, within_s: float = 60.0) -> str:
    """What a terminal was shown until its program ended."""
    data, deadline = b"", time.monotonic() + within_s
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        try:
            data += os.read(descriptor, 65536)
        except OSError:  # how a terminal says that nobody holds its other end any more
            return data.decode()
    raise AssertionError(f"the program did not end within {within_s} s: {data!r}")


@pytest.mark.integration
def test_page_is_served_until_the_process_is_told_to_stop(run_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "view", str(run_path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
