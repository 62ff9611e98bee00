"""Commands reach the engine's thread in order, and it wakes for them."""

import threading
import time
from pathlib import Path

from inference.torch_engine.inbox import Abort, Inbox, Stop
from tests.inference.conftest import running_engine
from tests.support.waiting import until_async


def test_commands_come_in_order_and_once() -> None:
    inbox = Inbox()
    for key in range(5):
        inbox.put(Abort(key))
    assert inbox.take(0) == [Abort(key) for key in range(5)]
    assert inbox.take(0) == []


def test_waiting_reader_is_woken_by_a_command() -> None:
    inbox = Inbox()
    threading.Timer(0.05, inbox.put, [Stop()]).start()
    started = time.monotonic()
    assert inbox.take(30) == [Stop()]
    assert time.monotonic() - started < 10


def test_empty_inbox_is_not_waited_for_longer_than_asked() -> None:
    started = time.monotonic()
    assert Inbox().take(0.05) == []
    assert 0.04 < time.monotonic() - started < 10


def test_commands_of_many_threads_are_all_taken() -> None:
    inbox = Inbox()
    writers = [
        threading.Thread(target=lambda first=first: [inbox.put(Abort(first + i)) for i in range(500)])
        for first in range(0, 4000, 500)
    ]
    for writer in writers:
        writer.start()
    taken: list[object] = []
    deadline = time.monotonic() + 30
    while len(taken) < 4000 and time.monotonic() < deadline:
        taken += inbox.take(0.1)
    assert sorted(command.key for command in taken) == list(range(4000))  # type: ignore[attr-defined]


async def test_idle_engine_shows_that_it_lives(model_dir: Path) -> None:
    signs: list[float] = []
    async with running_engine(model_dir, on_progress=lambda: signs.append(time.monotonic())):
        seen = len(signs)
        await until_async(lambda: len(signs) >= seen + 2, 60)
