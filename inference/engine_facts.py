"""What `/health` says of an engine, whichever server it is behind."""

from inference.engine import Engine
from inference.update_times import phases_of


def engine_facts(engine: Engine) -> dict[str, object]:
    """The part of the report that docs/contracts.md promises of every engine."""
    stats, served, limits = engine.stats, engine.served, engine.limits
    return {
        "version": served.version,
        "digest": served.digest,
        "running": stats.running,
        "waiting": stats.waiting,
        "max_batch_size": limits.max_batch_size,
        "max_model_len": limits.max_model_len,
        "vocab_size": limits.vocab_size,
        "last_update": phases_of(engine.last_update),
    }
