"""Which line a run has: what `staleness_policy` means for the order of groups (admission: `admission.py`)."""

from orchestrator.config import OrchestratorConfig
from orchestrator.drop_lineup import DropLineup
from orchestrator.lineup import Finish, Lineup
from transport.wire.ledger import CompletedPositions


def make_lineup(config: OrchestratorConfig, next_step: int, done: CompletedPositions, finish: Finish) -> Lineup:
    """The line of `config.staleness_policy`."""
    match config.staleness_policy:
        case "wait":
            return Lineup(config.batch_size, next_step, done, finish)
        case "drop":
            return DropLineup(config.batch_size, next_step, done, finish, max_staleness=config.max_staleness)
