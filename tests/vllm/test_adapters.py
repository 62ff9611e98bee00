"""LoRA on real vLLM: versions are adapters, loaded at run time, proven, and never mixed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import torch
from transformers import PreTrainedModel

from tests.inference.adapters import RANK, make_adapter, publish_adapter, with_adapter
from tests.inference.contract_server import (
    Server,
    apply,
    assert_exact,
    body,
    generate,
    make_model,
    running_server,
    save_model,
    served,
    until_begun,
)
from tests.integration.circle import ROOT, VLLM_FLAGS, run_rl
from tests.support.models import publish
from transport.wire.generation import GenerateReply
from transport.wire.weights import read_weight_manifest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
LORA_CONFIG = ROOT / "configs" / "copy_text_lora" / "rl.toml"
NUM_VERSIONS = 12
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
"""Parts of fused modules, and whole ones."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    return make_model(0)


@pytest.fixture(scope="module")
def server(folder: Path, base: PreTrainedModel) -> Iterator[Server]:
    flags = ("--vllm.max-lora-rank", str(RANK), "--vllm.max-loras", "2")
    with running_server(folder, save_model(folder / "model", base), *flags, engine="vllm") as server:
        yield server


@pytest.fixture(scope="module")
def manifests(folder: Path, base: PreTrainedModel) -> dict[int, Path]:
    return {
        version: publish_adapter(folder / "weights", base, make_adapter(base, version, TARGETS), version)
        for version in range(1, NUM_VERSIONS)
    }


@pytest.fixture(scope="module")
def models(base: PreTrainedModel) -> dict[int, PreTrainedModel]:
    adapted = {v: with_adapter(base, make_adapter(base, v, TARGETS)) for v in range(1, NUM_VERSIONS)}
    return {0: base, **adapted}


@pytest.fixture
async def http(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    url = await asyncio.to_thread(lambda: server.url)
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


async def test_version_0_is_the_base_and_each_adapter_is_exact_and_proven(
    http: aiohttp.ClientSession, server: Server, models: dict[int, PreTrainedModel], manifests: dict[int, Path]
) -> None:
    assert_exact(models, [5, 6, 7], await generate(http, body([5, 6, 7], 24)))
    for version in (1, 2):
        status, answer = await apply(http, server, manifests[version], version)
        times = answer.pop("times")
        assert (status, answer) == (200, await served(http, server))
        assert times.keys() == {"transfer_s", "pause_s", "apply_s"}  # type: ignore[attr-defined]
        assert answer["digest"] == read_weight_manifest(manifests[version]).digest
        reply = await generate(http, body([5, 6, 7], 24))  # the same prompt: its prefix is cached under every version
        assert [span.version for span in reply.versions] == [version]
        assert_exact(models, [5, 6, 7], reply)


async def test_requests_in_flight_keep_their_version_and_none_is_lost(
    http: aiohttp.ClientSession, server: Server, models: dict[int, PreTrainedModel], manifests: dict[int, Path]
) -> None:
    """More versions at once than are decoded together."""
    for _ in range(5):  # on a busy machine the first may end before the last begin
        tasks: list[asyncio.Task[GenerateReply]] = []
        for version in (3, 4, 5, 6):
            assert (await apply(http, server, manifests[version], version))[0] == 200
            tasks += [asyncio.create_task(generate(http, body([version, 6 + i], 240, seed=i))) for i in range(4)]
            await until_begun(http, tasks)
        were_together = not tasks[0].done()
        for index, reply in enumerate(await asyncio.wait_for(asyncio.gather(*tasks), 120)):
            version, i = 3 + index // 4, index % 4
            assert [span.version for span in reply.versions] == [version]
            assert reply.finish_reason == "length"
            assert_exact(models, [version, 6 + i], reply)
        if were_together:
            return
    pytest.fail("the versions were never in flight together")


async def test_adapters_that_nobody_uses_leave(
    folder: Path, http: aiohttp.ClientSession, server: Server, manifests: dict[int, Path]
) -> None:
    for version in (7, 8, 9):
        assert (await apply(http, server, manifests[version], version))[0] == 200
    kept = sorted(path.name[:9] for path in server.run_dir.path.glob("adapters/*"))
    assert kept == ["v00000008", "v00000009"]


async def test_what_is_no_adapter_of_this_base_is_refused_and_the_old_version_stays(
    folder: Path,
    http: aiohttp.ClientSession,
    server: Server,
    base: PreTrainedModel,
    models: dict[int, PreTrainedModel],
    manifests: dict[int, Path],
) -> None:
    assert (await apply(http, server, manifests[10], 10))[0] == 200
    before = await served(http, server)
    other = publish_adapter(folder / "other", make_model(5), make_adapter(base, 1), 11)
    whole = publish(folder / "whole", make_model(5), 11)
    for path, reason in ((other, "adapter of another model"), (whole, "takes only adapters")):
        status, answer = await apply(http, server, path, 11)
        assert status == 409
        assert reason in str(answer)
    assert await served(http, server) == before
    assert_exact(models, [5, 6], await generate(http, body([5, 6], 16)))


async def test_torn_adapter_is_refused(
    folder: Path, http: aiohttp.ClientSession, server: Server, base: PreTrainedModel
) -> None:
    path = publish_adapter(folder / "torn", base, make_adapter(base, 11), 11)
    shard = next(path.parent.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    before = await served(http, server)
    assert (await apply(http, server, path, 11))[0] == 409
    assert await served(http, server) == before


def test_reference_has_versions_that_differ(models: dict[int, PreTrainedModel]) -> None:
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        logits = [models[version](tokens).logits for version in (0, 1, 2)]
    assert all((logits[i] - logits[j]).abs().max() > 0.1 for i, j in ((0, 1), (1, 2)))


def test_run_with_vllm_samples_with_the_adapter_that_was_trained(tmp_path: Path, copy_model: Path) -> None:
    flags = (*VLLM_FLAGS, "--max-steps", "3", "--orchestrator.max-staleness", "0")
    run = run_rl(tmp_path, copy_model, *flags, config=LORA_CONFIG, timeout_s=550)
    assert run.exit_code == 0, run.output
    assert min(run.column("trainer", "ratio/all/min")) > 1 - 1e-4
    assert max(run.column("trainer", "ratio/all/max")) < 1 + 1e-4
    assert (run.path / "adapters").is_dir()
