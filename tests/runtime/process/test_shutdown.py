"""Stop signals while a service loads: there is nothing to finish, so it ends at once, and well."""

import signal
import subprocess
import sys

import pytest

from runtime.process.shutdown import ending_at_once

LOADS = """
import sys, time
from runtime.process.shutdown import Shutdown, ending_at_once
how = sys.argv[1]
leave = lambda: print("left", flush=True)
with ending_at_once():
    if how == "before":
        print("ready", flush=True)
        time.sleep(60)
shutdown = Shutdown()
if how == "requested":
    shutdown.request()
    print("ready", flush=True)
with shutdown.loading(leave):
    if how == "loading":
        print("ready", flush=True)
        time.sleep(60)
print("ready", flush=True)
shutdown.wait(60)
print("graceful", flush=True)
"""


@pytest.mark.parametrize(
    ("how", "said"), [("before", ""), ("loading", "left"), ("loaded", "graceful")], ids=["before", "loading", "after"]
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_is_exit_code_0_in_every_phase(how: str, said: str, number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", LOADS, how], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read().strip() == said
        assert process.wait(timeout=10) == 0


def test_stop_that_was_asked_for_before_keeps_loading_from_starting() -> None:
    done = subprocess.run([sys.executable, "-c", LOADS, "requested"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "ready\nleft\n")


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ending_at_once():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


ASKED = """
import os, signal
from runtime.process.shutdown import Shutdown
shutdown = Shutdown()
shutdown.request()
os.kill(os.getpid(), signal.SIGTERM)
print("goes on", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("never", flush=True)
"""


def test_a_signal_that_comes_after_another_request_to_stop_is_the_first_one() -> None:
    """A rank hears from its peers that all stop, and then from its own machine."""
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "goes on\n")
