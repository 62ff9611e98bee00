"""One suite for every engine: the HTTP contract of docs/contracts.md, against a server started by the user's command.

`make test` runs it against the embedded engine, `make test-vllm` against vLLM.
"""

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from inference.weights.publish import model_digest, served_tensors
from tests.inference.contract_server import (
    ENGINE,
    MAX_BATCH_SIZE,
    MAX_MODEL_LEN,
    PROMPT,
    TOLERANCE,
    Server,
    apply,
    assert_exact,
    body,
    error_of,
    generate,
    health,
    make_model,
    running_server,
    save_model,
    served,
    until_begun,
    until_health,
)
from tests.support.models import VOCAB_SIZE, publish, score
from tests.transport.weights.weight_ranks import Tensors, WeightRanks
from trainer.weights.broadcast import Broadcaster
from transport.wire.codec import encode
from transport.wire.generation import (
    GENERATE_PATH,
    MSGPACK,
    SCORE_PATH,
    WEIGHTS_PATH,
    GenerateReply,
    ScoreReply,
    ScoreRequest,
)
from transport.wire.sample import EncodedTensor
from transport.wire.weights import Channel, location_of, read_weight_manifest

pytestmark = pytest.mark.integration

NUM_VERSIONS = 12


@pytest.fixture(scope="module")
def models() -> dict[int, PreTrainedModel]:
    """Policy versions; 0 is what the server starts with."""
    return {version: make_model(version) for version in range(NUM_VERSIONS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server lives."""
    return tmp_path_factory.mktemp("contract")


@pytest.fixture(scope="module")
def server(folder: Path, models: dict[int, PreTrainedModel]) -> Iterator[Server]:
    """One server for all tests of this file: vLLM takes 20 s to start."""
    with running_server(folder, save_model(folder / "model", models[0]), cold=True) as server:
        yield server


@pytest.fixture(scope="module")
def manifests(folder: Path, models: dict[int, PreTrainedModel]) -> dict[int, Path]:
    """A publish of every version."""
    return {version: publish(folder / "weights", model, version) for version, model in models.items()}


@pytest.fixture(scope="module")
def ranks(models: dict[int, PreTrainedModel]) -> Iterator[WeightRanks]:
    """Two trainer ranks that serve every version from memory."""
    with WeightRanks(2, open_group=broadcaster().open) as ranks:
        for version, model in models.items():
            ranks.put(tensors_of(model), version)
        yield ranks


@pytest.fixture(params=["filesystem", "zmq", "collective"])
def locations(request: pytest.FixtureRequest, manifests: dict[int, Path], ranks: WeightRanks) -> dict[int, str]:
    """Where every version is, on each channel."""
    if request.param == "filesystem":
        return {version: str(path) for version, path in manifests.items()}
    return dict.fromkeys(manifests, location_of(Channel(request.param), ranks.endpoints[0]))


def broadcaster() -> Broadcaster:
    return Broadcaster("127.0.0.1", None, torch.device("cpu"), timeout_s=60)


def tensors_of(model: PreTrainedModel) -> Tensors:
    return {name: tensor.detach().numpy() for name, tensor in served_tensors(model)}


@pytest.fixture
async def http(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    """A client session."""
    url = await asyncio.to_thread(lambda: server.url)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


@pytest.fixture(autouse=True)
async def version_zero(http: aiohttp.ClientSession, server: Server, manifests: dict[int, Path]) -> None:
    """Every test starts with the first weights."""
    if (await served(http, server))["version"] != 0:
        assert (await apply(http, server, manifests[0], 0))[0] == 200


async def test_health_has_the_shape_of_the_contract(
    http: aiohttp.ClientSession, models: dict[int, PreTrainedModel]
) -> None:
    report = await health(http)
    assert (
        report.items()
        >= {
            "status": "ok",
            "engine": ENGINE,
            "model": "model",
            "version": 0,
            "digest": model_digest(models[0]),
            "running": 0,
            "waiting": 0,
            "max_batch_size": MAX_BATCH_SIZE,
            "max_model_len": MAX_MODEL_LEN,
            "vocab_size": VOCAB_SIZE,
            "waiting_for": "",
        }.items()
    )
    assert isinstance(report["progress_age_s"], float)


async def test_models_are_served(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/models") as response:
        assert [card["id"] for card in (await response.json())["data"]] == ["model"]


async def test_chat_completions_are_served(http: aiohttp.ClientSession) -> None:
    asked = {"model": "model", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4, "temperature": 0}
    async with http.post("/v1/chat/completions", json=asked) as response:
        reply = await response.json()
    assert (reply["choices"][0]["message"]["role"], reply["usage"]["completion_tokens"]) == ("assistant", 4)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
async def test_logprobs_are_those_of_the_model_at_the_temperature(
    http: aiohttp.ClientSession, models: dict[int, PreTrainedModel], temperature: float
) -> None:
    requests = [body([5 + i, 6], 64, temperature=temperature, seed=i) for i in range(16)]
    for i, reply in enumerate(await asyncio.gather(*(generate(http, request) for request in requests))):
        assert (reply.request_id, reply.finish_reason, reply.token_ids.shape) == ("r1", "length", (64,))
        assert_exact(models, [5 + i, 6], reply, temperature)


async def test_given_tokens_are_scored_by_the_torch_engine_and_vllm_says_501(
    http: aiohttp.ClientSession, models: dict[int, PreTrainedModel]
) -> None:
    tokens = [*PROMPT, 9, 30, 12]
    asked = ScoreRequest(request_id="s1", token_ids=EncodedTensor.of(np.array(tokens, dtype=np.int32)), temperature=0.7)
    async with http.post(SCORE_PATH, data=encode(asked)) as response:
        if ENGINE == "vllm":
            assert (await error_of(response))[:2] == (501, "unsupported")
            return
        assert (response.status, response.content_type) == (200, MSGPACK)
        reply = msgspec.msgpack.decode(await response.read(), type=ScoreReply)
    assert (reply.request_id, reply.version) == ("s1", 0)
    expected = score(models[0], tokens[:1], tokens[1:], 0.7)
    torch.testing.assert_close(torch.tensor(reply.logprobs.numpy()[1:]), expected, atol=TOLERANCE, rtol=0)


async def test_greedy_takes_the_likeliest_tokens(
    http: aiohttp.ClientSession, models: dict[int, PreTrainedModel]
) -> None:
    reply = await generate(http, body(max_tokens=20, temperature=0.0))
    expected = models[0].generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), max_new_tokens=20, do_sample=False
    )
    assert reply.token_ids.numpy().tolist() == expected[0, len(PROMPT) :].tolist()
    assert_exact(models, PROMPT, reply)


async def test_seed_decides_the_sample(http: aiohttp.ClientSession) -> None:
    seeds = [1, 2, 1, 2**63 + 5, -7]
    replies = await asyncio.gather(*(generate(http, body(max_tokens=32, seed=seed)) for seed in seeds))
    tokens = [reply.token_ids.data for reply in replies]
    assert tokens[0] == tokens[2]
    assert len(set(tokens)) == 4


async def test_stop_token_ends_the_reply_and_is_part_of_it(http: aiohttp.ClientSession) -> None:
    free = (await generate(http, body(max_tokens=20, temperature=0.0))).token_ids.numpy().tolist()
    stop = free[3]
    reply = await generate(http, body(max_tokens=20, temperature=0.0, stop_token_ids=(stop,)))
    assert reply.finish_reason == "stop"
    assert reply.token_ids.numpy().tolist() == free[: free.index(stop) + 1]


async def test_completion_is_cut_where_the_model_ends(http: aiohttp.ClientSession) -> None:
    reply = await generate(http, body([5] * (MAX_MODEL_LEN - 3), max_tokens=50))
    assert (reply.token_ids.shape, reply.finish_reason) == ((3,), "length")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"nonsense", "GenerateRequest"),
        (body([5] * MAX_MODEL_LEN), "max_model_len"),
    ],
)
async def test_bad_request_is_400_with_the_reason(http: aiohttp.ClientSession, data: bytes, reason: str) -> None:
    async with http.post(GENERATE_PATH, data=data) as response:
        status, kind, message = await error_of(response)
    assert (status, kind) == (400, "invalid_request_error")
    assert reason in message


async def test_oversized_body_is_413(http: aiohttp.ClientSession) -> None:
    async with http.post(GENERATE_PATH, data=io.BytesIO(b"x" * (17 * 2**20))) as response:
        assert response.status == 413


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}])
async def test_admin_routes_need_the_token(http: aiohttp.ClientSession, headers: dict[str, str]) -> None:
    for method in ("GET", "POST"):
        async with http.request(method, WEIGHTS_PATH, headers=headers) as response:
            assert (await error_of(response))[:2] == (401, "wrong_admin_token")


async def test_update_is_read_back_and_changes_what_is_sampled(
    http: aiohttp.ClientSession, server: Server, models: dict[int, PreTrainedModel], locations: dict[int, str]
) -> None:
    before = await generate(http, body(max_tokens=32, temperature=0.0))
    expected = {"version": 3, "digest": model_digest(models[3])}
    status, answer = await apply(http, server, locations[3], 3)
    assert (status, {key: answer[key] for key in expected}) == (200, expected)
    assert await served(http, server) == expected
    report = await health(http)
    assert report.items() >= expected.items()
    phases = {"transfer_s", "pause_s", "apply_s"}
    assert report["last_update"].keys() == answer["times"].keys() == phases  # type: ignore[attr-defined]
    after = await generate(http, body(max_tokens=32, temperature=0.0))  # same prompt: its prefix was cached
    assert [span.version for span in after.versions] == [3]
    assert before.token_ids.data != after.token_ids.data
    assert_exact(models, PROMPT, after)


async def test_older_version_can_be_served_again(
    http: aiohttp.ClientSession, server: Server, models: dict[int, PreTrainedModel], manifests: dict[int, Path]
) -> None:
    for version in (2, 1):
        assert (await apply(http, server, manifests[version], version))[0] == 200
        assert_exact(models, PROMPT, await generate(http, body(max_tokens=16)))


def corrupt(path: Path) -> None:
    shard = next(path.parent.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8] + b"\1" * 8)


def truncate(path: Path) -> None:
    shard = next(path.parent.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])


def remove_shard(path: Path) -> None:
    next(path.parent.glob("*.safetensors")).unlink()


@pytest.mark.parametrize("damage", [corrupt, truncate, remove_shard, Path.unlink], ids=lambda f: f.__name__)
async def test_damaged_publish_is_409_and_the_old_weights_serve(
    http: aiohttp.ClientSession, server: Server, models: dict[int, PreTrainedModel], tmp_path: Path, damage: object
) -> None:
    path = publish(tmp_path, models[1], 1)
    damage(path)  # type: ignore[operator]
    status, answer = await apply(http, server, path, 1)
    assert (status, answer["error"]["type"]) == (409, "weights_refused")  # type: ignore[index]
    assert (await served(http, server))["digest"] == model_digest(models[0])
    reply = await generate(http, body(max_tokens=16))
    assert [span.version for span in reply.versions] == [0]
    assert_exact(models, PROMPT, reply)


@pytest.mark.parametrize("channel", ["zmq", "collective"])
async def test_damaged_or_lost_transfer_is_409_and_the_old_weights_serve(
    http: aiohttp.ClientSession, server: Server, models: dict[int, PreTrainedModel], channel: str
) -> None:
    options = {"open_group": broadcaster().open} if channel == "collective" else {}
    with WeightRanks(2, **options) as ranks:
        location = ranks.put(tensors_of(models[1]), 1, damage=True)
        assert (await apply(http, server, location, 1))[0] == 409
        assert (await apply(http, server, location, 2))[0] == 409
        ranks.put(tensors_of(make_model(1, tied=False)), 3)
        assert (await apply(http, server, location, 3))[0] == 409
    with WeightRanks(2, run_id="other") as ranks:
        assert (await apply(http, server, ranks.put(tensors_of(models[1]), 1), 1))[0] == 409
    assert (await served(http, server))["digest"] == model_digest(models[0])
    assert_exact(models, PROMPT, await generate(http, body(max_tokens=16)))


async def test_publish_of_another_run_version_or_model_is_409(
    http: aiohttp.ClientSession, server: Server, models: dict[int, PreTrainedModel], tmp_path: Path
) -> None:
    other_run = publish(tmp_path / "run", models[1], 1, run_id="other")
    untied = publish(tmp_path / "model", make_model(1, tied=False), 1)
    for path, version in ((other_run, 1), (publish(tmp_path / "version", models[1], 1), 2), (untied, 1)):
        assert (await apply(http, server, path, version))[0] == 409
    assert (await served(http, server))["version"] == 0


async def test_malformed_update_is_400(http: aiohttp.ClientSession, server: Server) -> None:
    for data in (b"", b"{}", b'{"manifest_path": "x", "version": "new"}', b'{"manifest_path":"x","version":1,"z":1}'):
        async with http.post(WEIGHTS_PATH, data=data, headers=server.admin) as response:
            assert response.status == 400


async def updates_in_flight(
    http: aiohttp.ClientSession, server: Server, locations: dict[int, str], prompts: list[list[int]]
) -> list[GenerateReply]:
    """Replies to requests that begin together, while one version follows the other as long as some are under way."""
    requests = [body(prompt, 200, f"r{i}", seed=i) for i, prompt in enumerate(prompts)]
    tasks = [asyncio.create_task(generate(http, request)) for request in requests]
    await until_begun(http, tasks)
    assert (await apply(http, server, "/nowhere/manifest.json", 1))[0] == 409
    for version in range(1, NUM_VERSIONS):
        if all(task.done() for task in tasks):
            break
        status, answer = await apply(http, server, locations[version], version)
        assert status == 200, answer
    return await asyncio.wait_for(asyncio.gather(*tasks), 120)


async def test_updates_under_64_requests_lose_none_and_every_token_has_its_version(
    http: aiohttp.ClientSession, server: Server, models: dict[int, PreTrainedModel], locations: dict[int, str]
) -> None:
    prompts = [[5 + i % 30] * (1 + i % 7) for i in range(64)]
    for _ in range(5):  # on a busy machine the first update may come when all requests have ended
        replies = await updates_in_flight(http, server, locations, prompts)
        assert [reply.request_id for reply in replies] == [f"r{i}" for i in range(64)]
        for prompt, reply in zip(prompts, replies, strict=True):
            assert reply.token_ids.shape == (200,)
            assert_exact(models, prompt, reply)
        if sum(len(reply.versions) > 1 for reply in replies) >= 32:
            break
    else:
        pytest.fail("the updates did not meet requests in flight")
    crossing = max(replies, key=lambda reply: len(reply.versions))
    span = crossing.versions[-1]
    tokens = crossing.token_ids.numpy().tolist()
    before = score(models[crossing.versions[0].version], prompts[replies.index(crossing)], tokens)[span.start :]
    assert float((before - torch.tensor(crossing.logprobs.numpy())[span.start :]).abs().max()) > 0.01


async def test_client_that_goes_away_frees_its_slot(http: aiohttp.ClientSession) -> None:
    task = asyncio.create_task(generate(http, body(max_tokens=250)))
    await until_health(http, "running", 1)
    task.cancel()
    await until_health(http, "running", 0)


def test_manifest_and_engine_agree_on_the_digest(
    manifests: dict[int, Path], models: dict[int, PreTrainedModel]
) -> None:
    assert read_weight_manifest(manifests[0]).digest == model_digest(models[0])
