"""Closing environments: foreign code at a time when the work is done. It must not hang, nor spoil what was achieved."""

import asyncio

from loguru import logger

from orchestrator.envs.protocol import EnvAdapter

CLOSE_TIMEOUT_S = 30.0
"""Seconds that an environment may take to close, its workers included."""


async def close_adapter(adapter: EnvAdapter, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
    """Close `adapter`; one that raises or takes longer than `timeout_s` costs a warning."""
    try:
        async with asyncio.timeout(timeout_s):
            await adapter.close()
    except TimeoutError:
        logger.warning("environment {} is not closed after {:g} s: it is left alone", adapter.name, timeout_s)
    except Exception as error:  # a decision: nothing of the run depends on it any more
        logger.opt(exception=error).warning("environment {} did not close: {}", adapter.name, error)
