"""What ends the orchestrator. A bad rollout is not here: that is data (`orchestrator.values.rollout.RolloutFailure`).

ServiceError (runtime)          ends the process with one line and an exit code
├── InvariantError              a promise of our own code is broken: a bug, exit code 1
├── AdvantageError              the advantage function broke its contract, exit code 1
├── CurriculumError             the weight function of a curriculum broke its contract, exit code 1
├── NoSignalError               only groups without any advantage, exit code 78
├── FailureRateError            too many rollouts of one environment fail, exit code 1
├── CanaryError                 an engine does not compute with the weights that it says it serves, exit code 1
├── EnvWorkersLostError         a worker of an environment dies again and again, exit code 1
├── LedgerError                 the ledger does not decode or does not balance, exit code 1
├── UserError
│   ├── StateColumnError        a column to save is missing or cannot be written, exit code 2
│   └── StateMismatchError      the run directory belongs to another configuration, exit code 2
└── PeerLostError
    └── EnginesLostError        too many rollouts fail because no engine, or teacher, answers, exit code 76

Exception
└── WorkerLinkError             an environment worker said what makes no sense, or too much; it costs the worker
"""

from runtime.errors import ExitCode, PeerLostError, ServiceError, UserError


class InvariantError(ServiceError):
    """Something that cannot happen did."""


class AdvantageError(ServiceError):
    """The message names the environment, the example and the function."""


class CurriculumError(ServiceError):
    """The message names the environment and the function."""


class NoSignalError(ServiceError):
    """The message says what to change."""

    exit_code = ExitCode.NO_SIGNAL


class FailureRateError(ServiceError):
    """The message names the environment and its commonest error."""


class CanaryError(ServiceError):
    """The message names the engine, what it says that it serves, and what it answered."""


class EnvWorkersLostError(ServiceError):
    """The message names the environment and how its worker ended."""


class WorkerLinkError(Exception):
    """The message says what came over the link. Caught where the worker is ended."""


class LedgerError(ServiceError):
    """The message names the file and the line or the numbers."""


class StateColumnError(UserError):
    """The message names the environment and the column."""


class StateMismatchError(UserError):
    """The message says which setting changed and how to go on."""


class EnginesLostError(PeerLostError):
    """The message names the environment that noticed and the engine's error."""
