"""`inference @ file.toml --model.path DIR ...`: serve a policy over HTTP."""

import importlib.util
from collections.abc import Sequence

from inference.config import InferenceConfig
from inference.vllm_engine.command import is_cpu_build
from runtime.base.files import sees_images
from runtime.config.config import load_config
from runtime.errors import UserError
from runtime.process.service import run_main
from runtime.process.shutdown import ending_at_once


def main() -> None:
    """Entry point of the console script."""
    run_main("inference", run)


def run(argv: Sequence[str]) -> None:
    """Serve until SIGTERM or SIGINT. torch is imported only when there is something to serve."""
    config = load_config(InferenceConfig, argv, prog="inference")
    check_engine(config)
    check_model_path(config)
    check_torchvision(config)
    with ending_at_once():
        from inference.service import serve

    serve(config)


def check_engine(config: InferenceConfig) -> None:
    """Raise `UserError` if the engine is not installed."""
    needed = {"torch": ("torch", "transformers", "safetensors"), "vllm": ("vllm", "torch", "transformers")}[
        config.engine
    ]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"--engine {config.engine} needs {', '.join(missing)}: pip install 'tandem-rl[{config.engine}]'"
        )


def check_model_path(config: InferenceConfig) -> None:
    """Raise `UserError` unless the folder looks like a Hugging Face model."""
    if not (config.model.path / "config.json").is_file():
        raise UserError(f"no model at --model.path {config.model.path}: expected a folder with config.json and weights")


def check_torchvision(config: InferenceConfig) -> None:
    """Raise `UserError` for a vision model that vLLM could not load: on a CPU it needs torchvision for that."""
    needs_torchvision = config.engine == "vllm" and sees_images(config.model.path) and is_cpu_build()
    if needs_torchvision and importlib.util.find_spec("torchvision") is None:
        raise UserError(
            f"the model in {config.model.path} has a vision tower, which this vLLM for CPUs cannot load without "
            "torchvision: use --engine torch, or install torchvision beside vLLM"
        )


if __name__ == "__main__":
    main()
