"""The run directory: folders, locks, announcements."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.errors import UserError
from runtime.run_dir.run_dir import FOLDERS, RunDir, ServiceInfo
from runtime.run_dir.service_lock import read_holder

# Holds the lock of a service until it is killed.
HOLDER = """
import sys, time
from pathlib import Path
from runtime.run_dir.run_dir import RunDir
lock = RunDir(Path(sys.argv[1])).lock("trainer")
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "test").create()


def start_holder(run_dir: RunDir) -> subprocess.Popen[bytes]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(run_dir.path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    with holder.stdout as lines:
        assert lines.readline() == b"held\n"
    return holder


def test_create_makes_every_folder_and_may_be_repeated(run_dir: RunDir) -> None:
    run_dir.create()
    assert {path.name for path in run_dir.path.iterdir()} == set(FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_folder_has_a_property(run_dir: RunDir, name: str) -> None:
    assert getattr(run_dir, name) == run_dir.path / name


def test_secrets_are_for_the_owner_only(run_dir: RunDir) -> None:
    assert run_dir.secrets.stat().st_mode & 0o777 == 0o700
    assert run_dir.admin_token.parent == run_dir.secrets


def test_place_that_is_a_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match=r"cannot create run directory .*runs/x.*--run\.dir"):
        RunDir(tmp_path / "runs" / "x").create()


def test_second_instance_is_told_pid_and_host_of_the_first(run_dir: RunDir) -> None:
    holder = start_holder(run_dir)
    try:
        with pytest.raises(
            UserError, match=rf"trainer already runs in .*pid {holder.pid} on host {socket.gethostname()}"
        ):
            run_dir.lock("trainer")
        run_dir.lock("orchestrator").release()
    finally:
        holder.kill()
        holder.wait()


def test_lock_of_a_killed_process_is_free(run_dir: RunDir) -> None:
    holder = start_holder(run_dir)
    holder.kill()
    holder.wait()
    run_dir.lock("trainer").release()


def test_released_lock_can_be_taken_again(run_dir: RunDir) -> None:
    with run_dir.lock("trainer") as lock:
        lock.release()
        lock.release()
        with run_dir.lock("trainer"), pytest.raises(UserError):
            run_dir.lock("trainer")
    run_dir.lock("trainer").release()


def test_holder_without_a_name_yet_is_still_refused(run_dir: RunDir) -> None:
    with run_dir.lock("trainer"):
        (run_dir.services / "trainer.lock").write_text("")
        with pytest.raises(UserError, match="just started"):
            run_dir.lock("trainer")


def test_announced_services_can_be_read(run_dir: RunDir) -> None:
    info = ServiceInfo(health_url="http://127.0.0.1:9102/health", addresses={"batches": "tcp://127.0.0.1:1"})
    run_dir.announce("trainer", info)
    run_dir.announce("orchestrator", ServiceInfo())
    assert run_dir.read_services() == {"orchestrator": ServiceInfo(), "trainer": info}
    assert info.host == socket.gethostname()


def test_withdrawn_and_broken_announcements_are_left_out(run_dir: RunDir) -> None:
    run_dir.announce("trainer", ServiceInfo())
    run_dir.withdraw("trainer")
    run_dir.withdraw("trainer")
    (run_dir.services / "other.json").write_text('{"pid": "many"}')
    (run_dir.services / "torn.json").write_text('{"pid": 1')
    assert run_dir.read_services() == {}


def test_only_what_nobody_alive_announced_is_a_leftover(run_dir: RunDir) -> None:
    for name in ("trainer", "orchestrator", "inference"):
        run_dir.announce(name, ServiceInfo())
    run_dir.lock("orchestrator").release("exit 76: gone")
    with run_dir.lock("trainer"):
        for name in ("trainer", "orchestrator", "inference"):
            run_dir.withdraw_leftover(name)
        with pytest.raises(UserError, match="trainer already runs"):
            run_dir.lock("trainer")
    assert run_dir.read_services() == {"trainer": ServiceInfo()}
    word = read_holder(run_dir.services / "orchestrator.lock")
    assert word is not None
    assert word.ended == "exit 76: gone", "looking at a lock must not change what its holder said"


def test_announcement_of_a_newer_version_is_understood(run_dir: RunDir) -> None:
    (run_dir.services / "new.json").write_text('{"pid": 7, "host": "h", "colour": "red"}')
    assert run_dir.read_services()["new"].pid == 7
