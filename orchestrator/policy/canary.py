"""`CanaryCheck`: do the engines compute with the weights that they say they serve?

Version and digest are read back after every update (`Engine.apply_weights`). Here their *answers* are compared with the
trainer's own, now and then: an engine that acknowledges an update and goes on with old weights is found out as soon as
the two differ by more than the tolerance.
"""

import asyncio

import numpy as np
from loguru import logger

from chat.trajectory import Floats
from orchestrator.config.engines import PolicyEnginesConfig
from orchestrator.engines.protocol import Engine
from orchestrator.errors import CanaryError
from transport.outbox.progress import PublishedWeights
from transport.wire.generation import GenerateReply, GenerateRequest
from transport.wire.sample import EncodedTensor
from transport.wire.weights import Canary


class CanaryCheck:
    """`check` is called when every engine in service says that it serves a version, before the version is live."""

    def __init__(self, engine: Engine, *, interval_steps: int, tolerance: float) -> None:
        self._engine = engine
        self._interval_steps = interval_steps
        self._tolerance = tolerance
        self._last_checked: int | None = None

    async def check(self, weights: PublishedWeights) -> None:
        """Compare, if it is time. Raises `CanaryError` that says which engine served what."""
        if weights.canary is None or not self._is_due(weights.version):
            return
        answers = await self._answers(weights.version, weights.canary)
        for url, found in answers.items():
            self._compare(url, weights, weights.canary.logprobs.numpy(), found)
        if answers:  # who could not be compared now is asked again at the next version
            self._last_checked = weights.version

    def _is_due(self, version: int) -> bool:
        if not self._interval_steps:
            return False
        return self._last_checked is None or abs(version - self._last_checked) >= self._interval_steps

    async def _answers(self, version: int, canary: Canary) -> dict[str, Floats]:
        """By engine: its log probabilities, of engines that answered every prefix with `version`."""
        prompt = canary.token_ids.numpy()
        lengths = canary.lengths.numpy().tolist()
        replies = await asyncio.gather(
            *(self._engine.generate_on_each(_request(version, prompt[:length])) for length in lengths)
        )
        urls = {url for answers in replies for url in answers}
        silent = {url for answers in replies for url in urls if not _is_of(answers.get(url), version)}
        if silent:
            logger.warning("the canary of version {} is not compared with {}: no answer of it", version, silent)
        return {
            url: np.concatenate([answers[url].logprobs.numpy()[:1] for answers in replies]) for url in urls - silent
        }

    def _compare(self, url: str, weights: PublishedWeights, expected: Floats, found: Floats) -> None:
        difference = float(np.abs(found - expected).max())
        logger.debug("canary of version {} on {}: largest difference {:.2g}", weights.version, url, difference)
        if difference <= self._tolerance:
            return
        raise CanaryError(
            f"engine {url} says that it serves version {weights.version} ({weights.digest}), but does not compute with "
            f"it: its log probabilities of the canary are {_numbers(found)}, the trainer's are {_numbers(expected)}; "
            f"the largest difference is {difference:.3g}, engines.canary_tolerance is {self._tolerance:g}. "
            "Restart that engine; if all engines differ, look at their dtype"
        )


def canary_check(engine: Engine, config: PolicyEnginesConfig) -> CanaryCheck:
    return CanaryCheck(engine, interval_steps=config.canary_interval_steps, tolerance=config.canary_tolerance)


def _request(version: int, prompt: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> GenerateRequest:
    return GenerateRequest(
        request_id=f"canary/{version}/{len(prompt)}",
        token_ids=EncodedTensor.of(np.ascontiguousarray(prompt)),
        max_tokens=1,
        temperature=0.0,
    )


def _is_of(reply: GenerateReply | None, version: int) -> bool:
    return reply is not None and all(span.version == version for span in reply.versions)


def _numbers(values: Floats) -> str:
    return "[" + ", ".join(f"{value:.4f}" for value in values.tolist()) + "]"
