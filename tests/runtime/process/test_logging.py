"""Logging of a service, in a process of its own: loguru's logger is one per process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.process.logging import LogFile

PROGRAM = """
import logging, sys, warnings
from pathlib import Path
from loguru import logger
from runtime.config.config import LogConfig
from runtime.process.logging import PRINTED, setup_logging
from runtime.run_dir.run_dir import RunDir

json_lines, level, rank = sys.argv[2] == "json", sys.argv[3], int(sys.argv[4]) if sys.argv[4] else None
setup_logging("trainer", LogConfig(json_lines=json_lines, level=level), RunDir(Path(sys.argv[1])).create(), rank=rank)
logger.info("step {step} of {{}} <red>", step=3)
logger.debug("detail")
logger.info("an answer: {}", "\\x1b[2Jgone\\u202e")
logging.getLogger("library").warning("old %s", "api")
logging.getLogger("library").info("chatter")
warnings.warn("deprecated thing")
logger.bind(**PRINTED).error("already on stderr")
try:
    secret_value = "hunter2"
    1 / 0
except ZeroDivisionError:
    logger.exception("it broke")
"""


def run_program(tmp_path: Path, form: str = "text", level: str = "INFO", rank: str = "") -> list[str]:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), form, level, rank]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_stderr_has_one_line_per_record(tmp_path: Path) -> None:
    lines = run_program(tmp_path)
    assert lines[0].endswith("INFO     step 3 of {} <red>")
    assert lines[1].endswith("INFO     an answer: \\x1b[2Jgone\\x202e"), "a terminal would obey the answer of a model"
    assert lines[2].endswith("WARNING  library: old api")
    assert "deprecated thing" in lines[3]
    assert not any("detail" in line or "chatter" in line or "already on stderr" in line for line in lines)


def test_log_file_has_the_same_and_what_was_printed_already(tmp_path: Path) -> None:
    run_program(tmp_path)
    text = (tmp_path / "logs" / "trainer.log").read_text()
    assert "step 3 of {} <red>" in text
    assert "ERROR    already on stderr" in text
    assert "ZeroDivisionError" in text


def test_tracebacks_do_not_show_values(tmp_path: Path) -> None:
    lines = run_program(tmp_path)
    assert any("ZeroDivisionError: division by zero" in line for line in lines)
    assert not any("hunter2" in line and "secret_value" not in line for line in lines)


def test_json_lines_are_whole_objects(tmp_path: Path) -> None:
    records = [json.loads(line) for line in run_program(tmp_path, form="json")]
    assert records[0]["message"] == "step 3 of {} <red>"
    assert {"time", "level", "service", "message"} <= set(records[0])
    assert records[0]["service"] == "trainer"
    assert records[-1]["message"] == "it broke"
    assert "ZeroDivisionError" in records[-1]["exception"]


def test_debug_level_lets_libraries_speak(tmp_path: Path) -> None:
    text = "\n".join(run_program(tmp_path, level="DEBUG"))
    assert "detail" in text
    assert "library: chatter" in text


def test_ranks_have_their_own_file_and_say_who_they_are(tmp_path: Path) -> None:
    lines = run_program(tmp_path, rank="1")
    assert lines[0].endswith("[rank 1] step 3 of {} <red>")
    assert (tmp_path / "logs" / "trainer-1.log").exists()
    run_program(tmp_path, rank="0")
    assert (tmp_path / "logs" / "trainer.log").exists()


def test_log_file_rotates_and_keeps_a_bounded_number(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", max_bytes=100, keep=2)
    for number in range(20):
        log.write(f"{number:03} {'x' * 45}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log.1", "a.log.2"]
    assert (tmp_path / "a.log.1").read_text().startswith("018")
    assert (tmp_path / "a.log.2").read_text().startswith("016")


def test_log_file_on_a_refusing_disk_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = LogFile(Path("/dev/full"))
    log.write("a\n")
    log.write("b\n")
    assert capsys.readouterr().err == "cannot write /dev/full: No space left on device; logging to stderr only\n"


def test_log_file_goes_on_after_its_folder_came_back(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "a.log")
    log.write("lost\n")
    (tmp_path / "logs").mkdir()
    log.write("kept\n")
    assert (tmp_path / "logs" / "a.log").read_text() == "kept\n"
