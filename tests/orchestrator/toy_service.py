"""`python -m tests.orchestrator.toy_service ...`: the real `orchestrator` process with a toy backend.

Takes the same command line as `orchestrator`. What the toy engine samples depends on the served version too, so a run
that resumed with the wrong weights would cut other batches. `TOY_LATENCY_S` slows every completion down.
"""

import os
import sys
from collections.abc import Sequence

import numpy as np

from chat.tokenizer import Int32s
from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.service import Backend, serve
from runtime.config.config import load_config
from runtime.process.service import run_main
from tests.orchestrator.toys import ToyEnv
from transport.wire.generation import GenerateRequest


def toy_backend(config: OrchestratorConfig) -> Backend:
    """One toy environment per configured one."""
    latency_s = float(os.environ.get("TOY_LATENCY_S", "0"))

    def script(request: GenerateRequest) -> Int32s:
        rng = np.random.default_rng([request.seed or 0, engine.weights.version])
        return rng.integers(1, 16, size=request.max_tokens).astype(np.int32)

    engine = ScriptedEngine(16, 0, script=script, latency=lambda request, _: latency_s * ((request.seed or 0) % 4))
    return Backend(engine, [ToyEnv(engine, name=env.label) for env in config.envs])


def run(argv: Sequence[str]) -> None:
    """As `orchestrator.cli.run`, without its checks of the model."""
    serve(load_config(OrchestratorConfig, argv, prog="toy"), toy_backend)


if __name__ == "__main__":
    run_main("toy", run, sys.argv[1:])
