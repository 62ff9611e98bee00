"""The protocol between the orchestrator and inference engines."""

from typing import Protocol

from transport.generation import GenerateReply, GenerateRequest, ServedWeights


class EngineError(Exception):
    """An engine did not answer usefully, after all retries."""


class InvalidResponse(EngineError):
    """An engine answered with something that must not be trained on. Not retried."""


class Engine(Protocol):
    """One engine, or a pool that looks like one."""

    async def start(self) -> None:
        """Wait until every engine is healthy. Raises `EngineError` at the deadline, naming the URL."""
        ...

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample. The reply is validated: lengths agree, log probabilities are finite and <= 0, ids are in the
        vocabulary, version spans cover every token. Raises `EngineError` or `InvalidResponse`."""
        ...

    async def apply_weights(self, manifest_path: str, version: int, digest: str) -> None:
        """Have every engine load and serve `version`, and read version and digest back. Raises `EngineError`."""
        ...

    async def served(self) -> ServedWeights:
        """What all engines serve; raises `EngineError` if they disagree."""
        ...

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...
