"""`rl @ configs/.../rl.toml [--key value ...]`: all services of one machine; `rl doctor RUN`; `rl keys DIR`.

Other packages bring further commands (`rl view RUN`, `rl report RUN`: `runtime/commands.py`).
"""

import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console

from runtime.atomic_write import atomic_write
from runtime.commands import find_command, nearest_command
from runtime.config import parse_config, resolved_json
from runtime.doctor import doctor
from runtime.errors import UserError
from runtime.launcher import Deadlines, Launch, Launcher, Outcome
from runtime.progress_view import make_view
from runtime.rl_config import RlConfig, compose, free_port
from runtime.run_dir import RunDir
from runtime.run_monitor import RunMonitor
from runtime.run_summary import summarize
from runtime.secret_file import read_or_make_secret
from runtime.service import run_main
from runtime.services import ServiceSpec, find_services
from runtime.shutdown import Shutdown


def main() -> NoReturn:
    """Entry point of the console script."""
    run_main("rl", run)


def run(argv: Sequence[str], specs: tuple[ServiceSpec, ...] | None = None) -> int:
    """Start, watch and stop the services (`specs`; by default all that are installed); the exit code."""
    if argv[:1] == ["doctor"]:
        return doctor(argv[1:])
    if argv[:1] == ["keys"]:
        from runtime.keys import keys  # zmq: nothing else here needs it

        return keys(argv[1:])
    if argv and argv[0][:1] not in ("", "-", "@"):
        if (command := find_command(argv[0])) is not None:
            return command(argv[1:])
        if "." not in argv[0] and (near := nearest_command(argv[0])) is not None:  # with a dot it is a file
            raise UserError(f"{argv[0]} is no command of `rl`; did you mean rl {near}?")
    if not argv:
        raise UserError("no config given: `rl @ FILE` starts a run (configs/ has examples), `rl --help` has all keys")
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
        return launch(config, specs, run_dir, shutdown)


def launch(config: RlConfig, specs: Sequence[ServiceSpec], run_dir: RunDir, shutdown: Shutdown) -> int:
    """Run the prepared run directory to its end, and say where everything is."""
    started = time.monotonic()
    console = Console(highlight=False)
    monitor = RunMonitor(run_dir, [spec.name for spec in specs], max_steps(config))
    deadlines = Deadlines(config.start_timeout_s, config.grace_s, config.end_timeout_s)
    launches = [plan_launch(spec, run_dir, config.trainer_ranks) for spec in specs]
    with make_view(console) as view:
        launcher = Launcher(launches, deadlines, run_dir=run_dir, monitor=monitor, view=view, shutdown=shutdown)
        outcome = launcher.run(prepare_command(config))
    print(
        summarize(run_dir, monitor.poll()[-1], seconds=time.monotonic() - started, finished=outcome is Outcome.FINISHED)
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
