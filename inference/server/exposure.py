"""The reminder that a server without a token is open to other machines."""

import asyncio

from loguru import logger

from inference.config import InferenceConfig

_REMINDER_S = 60.0


async def remind_of_exposure(config: InferenceConfig) -> None:
    """Log it every minute, until cancelled; return at once if there is nothing to log."""
    while config.server.is_exposed and config.admin_token_file is None:
        host = config.server.host
        logger.warning(f"{host} is reachable from other machines and has no admin token (server.insecure = true)")
        await asyncio.sleep(_REMINDER_S)
