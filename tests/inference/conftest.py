"""A tiny Qwen3 on disk, an engine over it, and a server over that."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from transformers import PreTrainedModel

from inference.api.engine import EngineLimits
from inference.config import InferenceConfig, ServedModelConfig
from inference.server.app import make_app
from inference.server.routes import ServerMetrics, ServerState
from inference.torch_engine.decoder import Decoder
from inference.torch_engine.engine import TorchEngine
from inference.torch_engine.loading import eos_token_ids, load_slot_model, load_tokenizer
from inference.weights.receiver import WeightReceiver
from runtime.health.health import Health
from tests.support.models import VOCAB_SIZE, make_model, save_model

ADMIN = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """As the service does: two threads are slower on tiny models, and much slower on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    """The model that the engine loads: the reference of most tests."""
    return make_model()


@pytest.fixture(scope="session")
def model_dir(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model` and its tokenizer as a Hugging Face folder."""
    return save_model(tmp_path_factory.mktemp("models") / "tiny", model)


@asynccontextmanager
async def running_engine(
    path: Path,
    *,
    slots: int = 8,
    length: int = 256,
    max_waiting: int = 64,
    eos: bool = False,
    on_progress: Callable[[], None] = lambda: None,
) -> AsyncIterator[TorchEngine]:
    """An engine over the model in `path`. Without `eos` random models do not stop by accident."""
    engine = TorchEngine(
        Decoder(load_slot_model(ServedModelConfig(path=path, device="cpu"), slots, length), slots, length),
        EngineLimits(VOCAB_SIZE, length, slots, max_waiting),
        eos_token_ids=eos_token_ids(path) if eos else frozenset(),
        seed=0,
        receiver=WeightReceiver("default"),
        on_progress=on_progress,
    )
    try:
        yield engine
    finally:
        await engine.stop(grace_s=5)


@pytest.fixture
async def engine(model_dir: Path) -> AsyncIterator[TorchEngine]:
    """Eight slots of 256 tokens."""
    async with running_engine(model_dir) as engine:
        yield engine


@asynccontextmanager
async def running_client(
    engine: TorchEngine | None, path: Path, *, token: str | None = "secret", timeout_s: float = 30.0
) -> AsyncIterator[TestClient]:
    """A client of a real server on a free port; `engine` None is a server that still loads."""
    health = Health("inference", stall_timeout_s=60)
    state = ServerState(
        model_names=(path.name, str(path)),
        admin_token=token,
        request_timeout_s=timeout_s,
        health=health,
        metrics=ServerMetrics(),
    )
    if engine is not None:
        state.loaded = (engine, load_tokenizer(InferenceConfig(model=ServedModelConfig(path=path))))
        health.ready()
    async with TestClient(TestServer(make_app(state), handler_cancellation=True)) as client:
        yield client


@pytest.fixture
async def client(engine: TorchEngine, model_dir: Path) -> AsyncIterator[TestClient]:
    """A client of a server over `engine`."""
    async with running_client(engine, model_dir) as client:
        yield client
