"""The CURVE keys of the link to the orchestrator, as the config names them. Needs no torch."""

from loguru import logger

from runtime.errors import UserError
from trainer.config.trainer import OrchestratorLinkConfig
from transport.errors import SecurityError
from transport.security.exposure import is_local
from transport.security.keys import CurveKeys


def load_keys(config: OrchestratorLinkConfig) -> CurveKeys | None:
    """The keys of this trainer, if it has any. Raises `UserError` naming the file that is missing or unsafe."""
    try:
        return None if config.keys_dir is None else CurveKeys.for_client(config.keys_dir, config.key_name)
    except SecurityError as error:
        raise UserError(f"orchestrator.keys_dir: {error}") from error


def warn_if_exposed(config: OrchestratorLinkConfig) -> None:
    """Say so when batches cross a network without keys."""
    if config.keys_dir is None and not is_local(config.endpoint):
        logger.warning(
            f"{config.endpoint} is another machine and orchestrator.keys_dir is not set: "
            "batches are neither encrypted nor known to come from our orchestrator"
        )
