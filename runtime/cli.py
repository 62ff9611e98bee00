"""`rl @ configs/.../rl.toml [--key value ...]`: all services of one machine; `rl doctor RUN`; `rl keys DIR`.

Other packages bring further commands (`rl view RUN`, `rl report RUN`: `find_command`).
"""

import sys
import time
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import NoReturn

from rich.console import Console

from runtime.base.files import read_or_make_secret
from runtime.config.config import parse_config, resolved_json
from runtime.doctor.view import doctor
from runtime.errors import UserError
from runtime.launch.launcher import END_TIMEOUT_S, Deadlines, Launch, Launcher, LaunchOutcome
from runtime.launch.progress_view import make_view, summarize
from runtime.launch.rl_config import RlConfig, ServiceSpec, compose, find_services, free_port
from runtime.launch.run_monitor import RunMonitor
from runtime.process.service import run_main
from runtime.process.shutdown import Shutdown
from runtime.run_dir.run_dir import RunDir
from transport.durable import atomic_write


def main() -> NoReturn:
    """Entry point of the console script."""
    run_main("rl", run)


def run(
    argv: Sequence[str], specs: tuple[ServiceSpec, ...] | None = None, *, end_timeout_s: float = END_TIMEOUT_S
) -> int:
    """Start, watch and stop the services (`specs`; by default all that are installed); the exit code.

    Once the first has ended, the others get `end_timeout_s`.
    """
    if argv[:1] == ["doctor"]:
        return doctor(argv[1:])
    if argv[:1] == ["keys"]:
        from runtime.keys import keys  # zmq: nothing else here needs it

        return keys(argv[1:])
    if argv and argv[0][:1] not in ("", "-", "@"):
        if (command := find_command(argv[0])) is not None:
            return command(argv[1:])
        if "." not in argv[0] and (near := nearest_command(argv[0])) is not None:  # with a dot it is a file
            raise UserError(f"{argv[0]} is not a command of `rl`; did you mean rl {near}?")
    if not argv:
        raise UserError(
            "no config given: `rl @ FILE` starts a run (configs/ has examples), `rl --help` explains the keys"
        )
    specs = specs or find_services()
    config = parse_config(compose(specs), argv, prog="rl")
    if config.dry_run:
        print(resolved_json(config))
        return 0
    run_dir = RunDir(config.run.path).create()
    with run_dir.lock("rl"):
        shutdown = Shutdown()
        check_model(config)
        write_configs(config, run_dir)
        ensure_token(config, run_dir)
        deadlines = Deadlines(config.start_timeout_s, config.grace_s, end_timeout_s)
        return launch(config, specs, run_dir, shutdown, deadlines)


def launch(
    config: RlConfig, specs: Sequence[ServiceSpec], run_dir: RunDir, shutdown: Shutdown, deadlines: Deadlines
) -> int:
    """Run the prepared run directory to its end, and say where everything is."""
    started = time.monotonic()
    console = Console(highlight=False)
    monitor = RunMonitor(run_dir, [spec.name for spec in specs], max_steps(config))
    launches = [plan_launch(spec, run_dir, config.trainer_ranks) for spec in specs]
    with make_view(console) as view:
        launcher = Launcher(launches, deadlines, run_dir=run_dir, monitor=monitor, view=view, shutdown=shutdown)
        outcome = launcher.run(prepare_command(config))
    print(
        summarize(
            run_dir, monitor.poll()[-1], seconds=time.monotonic() - started, finished=outcome is LaunchOutcome.FINISHED
        )
    )
    return 0


def plan_launch(spec: ServiceSpec, run_dir: RunDir, trainer_ranks: int) -> Launch:
    """The command of a service: `python -m <module> @ <resolved config>`, under torchrun for several ranks."""
    arguments: tuple[str, ...] = ("-m", spec.module, "@", str(run_dir.config / f"{spec.name}.json"))
    if spec.name == "trainer" and trainer_ranks > 1:
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(trainer_ranks))
        arguments = (*torchrun, "--master-addr", "127.0.0.1", "--master-port", str(free_port()), *arguments)
    return Launch(spec.name, (sys.executable, *arguments), spec.ends_by_itself)


def max_steps(config: RlConfig) -> int | None:
    """Steps of the run, as the services will count them."""
    found = [getattr(service, "max_steps", None) for service in config.services.values()]
    return next((steps for steps in found if steps), config.max_steps)


def check_model(config: RlConfig) -> None:
    """Raise `UserError` if the model is not there and nothing would make it."""
    if not config.model.path.exists() and not config.prepare:
        raise UserError(f"model.path = {config.model.path} does not exist, and `prepare` is not set to make it")


def prepare_command(config: RlConfig) -> tuple[str, ...]:
    """The command that makes the model, or nothing if it exists."""
    if config.model.path.exists():
        return ()
    return tuple(sys.executable if word == "python" else word for word in config.prepare)


def write_configs(config: RlConfig, run_dir: RunDir) -> None:
    """Write what each service will load, and the whole."""
    atomic_write(run_dir.config / "rl.json", resolved_json(config).encode())
    for name, service in config.services.items():
        atomic_write(run_dir.config / f"{name}.json", resolved_json(service).encode())


def ensure_token(config: RlConfig, run_dir: RunDir) -> None:
    """Make the admin token of the run unless it exists. A file that the user names must exist already."""
    path = config.admin_token_file or run_dir.admin_token
    if path != run_dir.admin_token and not path.exists():
        raise UserError(f"admin_token_file = {path} does not exist")
    read_or_make_secret(path)


COMMAND_GROUP = "tandem.commands"
OWN = ("doctor", "keys")
"""Commands that `rl` has without other packages."""
RlCommand = Callable[[Sequence[str]], int]
"""Takes the arguments after its name, returns the exit code."""


def find_command(name: str) -> RlCommand | None:
    """The command of that name; `None` if no installed package brings one."""
    found = entry_points(group=COMMAND_GROUP, name=name)
    if not found:
        return None
    command: RlCommand = next(iter(found)).load()
    return command


def nearest_command(name: str) -> str | None:
    """The command that `name` was probably meant to be, if one is like it."""
    known = [*OWN, *(entry.name for entry in entry_points(group=COMMAND_GROUP))]
    return next(iter(get_close_matches(name, known, n=1)), None)
