"""Rows 19 and 20: weights that are torn, flipped, lost, lied about or missed. The old ones stay in service."""

import asyncio
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from orchestrator.config.engines import EnginesConfig
from orchestrator.engines.http_engine import HttpEngine
from orchestrator.policy.weight_updates import WeightUpdates
from runtime.health.health import Health
from tests.faults.storage.save_kills import lines
from tests.faults.storage.services import TIMEOUT_S, Announcements, EngineProcess
from tests.faults.storage.small_disk import check_whole
from tests.orchestrator.engine_server import TOKEN, EngineServer, serving
from tests.support.process import frozen
from tests.support.waiting import until_async
from transport.outbox.progress import PublishedWeights
from transport.wire.weights import version_dir

pytestmark = pytest.mark.integration
RUN_ID = "published"
NUM_KILLS = 8


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "admin.token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


@pytest.fixture
def engine(tmp_path: Path, model_path: Path, token_file: Path) -> Iterator[EngineProcess]:
    process = EngineProcess(tmp_path / "engine", model_path, RUN_ID, token_file)
    yield process
    process.process.kill()


@pytest.fixture
def source(tmp_path: Path, model_path: Path) -> Announcements:
    return Announcements(tmp_path / "run" / "weights", RUN_ID, model_path)


@asynccontextmanager
async def following(url: str, source: Announcements, update_timeout_s: float = 10.0) -> AsyncIterator[WeightUpdates]:
    """The orchestrator's own policy loop and engine pool, without the rest of it."""
    config = EnginesConfig(urls=(url,), start_timeout_s=TIMEOUT_S, update_timeout_s=update_timeout_s)
    pool = HttpEngine(config, TOKEN)
    policy = WeightUpdates(
        pool, source, Health("orchestrator", 60), update_timeout_s=update_timeout_s, on_live=lambda: None
    )
    try:
        await pool.start()
        await policy.start(newest_batch=0, timeout_s=TIMEOUT_S)
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
            loop = tasks.create_task(policy.run())
            yield policy
            loop.cancel()
    finally:
        await pool.close()


def shard_of(folder: Path) -> Path:
    (shard,) = folder.glob("*.safetensors")
    return shard


def flip(folder: Path) -> None:
    shard = shard_of(folder)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def tear(folder: Path) -> None:
    os.truncate(shard_of(folder), shard_of(folder).stat().st_size - 1)


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (flip, "is corrupt: its hash differs"),
    (tear, "bytes, the manifest says"),
    (lose_manifest, "the publish is incomplete"),
    (shutil.rmtree, "or was cleaned up"),
]


async def test_a_damaged_publish_leaves_the_old_weights_in_service_until_a_whole_one_is_there(
    engine: EngineProcess, source: Announcements, warnings_seen: list[str], tmp_path: Path
) -> None:
    root = tmp_path / "run" / "weights"
    async with following(engine.url, source) as policy:
        for version, (damage, reason) in enumerate(DAMAGES, start=1):
            weights = source.publish(version)
            damage(version_dir(root, version))
            warnings_seen.clear()
            source.announce(weights)
            await until_async(lambda: len(warnings_seen) >= 2, TIMEOUT_S)
            assert policy.live == version - 1
            said = f"version {version} is not live, {version - 1} stays: {engine.url}"
            for warning in warnings_seen:
                assert warning.startswith(said)
                assert reason in warning
            source.publish(version)
            await until_async(lambda version=version: policy.live == version, TIMEOUT_S)
    assert engine.versions == [1, 2, 3, 4]


async def test_an_engine_that_says_yes_and_serves_the_old_weights_is_named_with_what_it_serves(
    source: Announcements, warnings_seen: list[str]
) -> None:
    async with serving(EngineServer(lies_about_weights=True)) as liar, following(liar.url, source) as policy:
        source.announce(source.publish(1))
        await until_async(lambda: len(warnings_seen) >= 3, TIMEOUT_S)
        assert policy.live == 0
        assert all(f"version 1 is not live, 0 stays: {liar.url} should serve version 1" in w for w in warnings_seen)
        assert all("serves version 0 (scripted-0)" in warning for warning in warnings_seen)
        liar.lies_about_weights = False
        source.announce(PublishedWeights(version=1, location="v1", digest="digest-1"))
        await until_async(lambda: policy.live == 1, TIMEOUT_S)


async def test_an_engine_with_the_right_version_of_other_weights_is_not_believed(
    source: Announcements, warnings_seen: list[str]
) -> None:
    async with serving(EngineServer()) as server, following(server.url, source) as policy:
        weights = source.publish(1)
        source.announce(weights)
        await until_async(lambda: len(warnings_seen) >= 2, TIMEOUT_S)
        assert policy.live == 0
        assert f"should serve version 1 ({weights.digest}), answered version 1 (digest-1)" in warnings_seen[0]


async def test_a_frozen_engine_that_missed_five_versions_jumps_to_the_newest(
    engine: EngineProcess, source: Announcements, tmp_path: Path
) -> None:
    root = tmp_path / "run" / "weights"
    async with following(engine.url, source, update_timeout_s=0.5) as policy:
        source.announce(source.publish(1))
        await until_async(lambda: policy.live == 1, TIMEOUT_S)
        with frozen(engine.process):
            for version in range(2, 7):
                source.announce(source.publish(version))
                await asyncio.sleep(0.2)  # not a wait: the policy loop tries meanwhile, and gives up
            assert policy.live == 1
            assert sorted(path.name for path in root.iterdir()) == ["v00000005", "v00000006"]
        await until_async(lambda: policy.live == 6, TIMEOUT_S)
    assert engine.versions[0] == 1
    assert engine.versions[-1] == 6
    assert 3 not in engine.versions


def test_a_killed_publish_is_absent_or_whole(tmp_path: Path, model_path: Path) -> None:
    torch.set_num_threads(1)  # a fork has no use for a pool of threads that stayed in its parent
    run = tmp_path / "run"
    draw = random.Random(5)
    announced = 0
    for _ in range(NUM_KILLS):
        child, pipe = publish_for_ever(run / "weights", model_path, announced + 1)
        news = lines(pipe)
        announced = int(next(news))
        time.sleep(draw.uniform(0.0, 0.05))  # not a wait: the instant is what is under test
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        announced = max([announced, *map(int, news)])
        check_whole(run)
        whole = sorted(int(path.parent.name[1:]) for path in (run / "weights").glob("v*/manifest.json"))
        assert whole[-1] in (announced, announced + 1)
        assert len(whole) >= 2 or announced == 1, "the version before stays, too"
    Announcements(run / "weights", RUN_ID, model_path).publish(announced + 2)
    assert not list((run / "weights").glob(".v*")), "the next publish clears away what was left"


def publish_for_ever(root: Path, model_path: Path, first: int) -> tuple[int, int]:
    """A process that publishes version after version, and says so; its pid and the pipe."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child:
        os.close(sender)
        return child, receiver
    try:
        source = Announcements(root, RUN_ID, model_path)
        for version in itertools.count(first):
            os.write(sender, f"{source.publish(version).version}\n".encode())
    finally:
        os._exit(1)
