"""Trainer and engine agree on the canary of the same weights, and disagree on that of others."""

from pathlib import Path

import numpy as np
import torch

from orchestrator.config.engines import EnginesConfig
from orchestrator.engines.http_engine import HttpEngine
from orchestrator.errors import CanaryError
from orchestrator.policy.canary import CanaryCheck
from tests.inference.conftest import running_client, running_engine
from tests.support.models import make_model, publish, save_model
from trainer.checks.canary import make_canary
from trainer.config.model import ModelConfig
from trainer.model.policy import load_policy
from transport.outbox.progress import PublishedWeights
from transport.wire.weights import read_weight_manifest

TOLERANCE = 1e-3


async def test_embedded_engine_answers_the_trainers_canary(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", make_model(0))
    trained = make_model(1)
    policy = load_policy(ModelConfig(path=save_model(tmp_path / "trained", trained), seq_len=64), torch.device("cpu"))
    manifest_path = publish(tmp_path / "weights", trained, 1)
    weights = PublishedWeights(
        version=1,
        location=str(manifest_path),
        digest=read_weight_manifest(manifest_path).digest,
        canary=make_canary(policy),
    )
    async with running_engine(base) as engine, running_client(engine, base) as client:
        pool = HttpEngine(EnginesConfig(urls=(str(client.make_url("")),), start_timeout_s=30), "secret")
        await pool.start()
        await pool.apply_weights(weights.location, weights.version, weights.digest)
        check = CanaryCheck(pool, interval_steps=1, tolerance=TOLERANCE)
        await check.check(weights)
        others = load_policy(ModelConfig(path=base, seq_len=64), torch.device("cpu"))
        stale = make_canary(others)
        failed = False
        try:
            await CanaryCheck(pool, interval_steps=1, tolerance=TOLERANCE).check(
                PublishedWeights(version=1, location="v1", digest=weights.digest, canary=stale)
            )
        except CanaryError:
            failed = True
        await pool.close()
    assert failed, "the engine serves other weights than this canary is of"
    assert weights.canary is not None
    assert np.abs(weights.canary.logprobs.numpy() - stale.logprobs.numpy()).max() > 10 * TOLERANCE
