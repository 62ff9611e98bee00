"""Configuration of `rl`: one file for all services of a machine; run as a module it prints all keys.

A key at the top level flows into every service that has a key of that name and does not set it itself. Addresses flow
from the service that binds to the ones that connect (`LINKS`). Both happen before validation, so that a mistake is
reported at the key the user wrote.
"""

import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, create_model, model_validator

from runtime.config.config import Config, LogConfig, MetricsConfig, RunConfig, ServiceConfig
from runtime.config.help import config_reference
from runtime.config.keys import Advanced, AdvancedKey, Tree, config_keys, get_value, merge, set_value
from runtime.errors import UserError
from runtime.run_dir.run_dir import RunDir
from transport.security.exposure import netloc, reachable

SERVICE_GROUP = "tandem.services"


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A service that `rl` can start with `python -m <module>`."""

    name: str
    module: str
    config_class: type[ServiceConfig]

    @property
    def ends_by_itself(self) -> bool:
        """A service that counts steps ends after the last; one that only serves is stopped when the others are done."""
        return "max_steps" in self.config_class.model_fields


def find_services() -> tuple[ServiceSpec, ...]:
    """All installed services, in the order they are started: servers first. Raises `UserError` on none."""
    specs = []
    for entry in entry_points(group=SERVICE_GROUP):
        config_class = entry.load()
        if not (isinstance(config_class, type) and issubclass(config_class, ServiceConfig)):
            raise UserError(f"entry point {entry.name} of {SERVICE_GROUP} is not a ServiceConfig: {entry.value}")
        specs.append(ServiceSpec(entry.name, entry.module.split(".")[0], config_class))
    if not specs:
        raise UserError(f"no services installed (entry points {SERVICE_GROUP}); install tandem-rl with pip")
    return in_start_order(specs)


def in_start_order(specs: Iterable[ServiceSpec]) -> tuple[ServiceSpec, ...]:
    """Those that only serve, then those that end by themselves; by name among equals."""
    return tuple(sorted(specs, key=lambda spec: (spec.ends_by_itself, spec.name)))


SHARED_KEYS = ("run", "log", "metrics", "stall_timeout_s", "model", "max_steps", "seed", "admin_token_file")


@dataclass(frozen=True, slots=True)
class KeyLink:
    """`target` is computed from the values of `sources`, unless the user set it."""

    target: str
    sources: tuple[str, ...]
    compute: Callable[..., object]


LINKS = (
    KeyLink(
        "orchestrator.engines.urls",
        ("inference.server.host", "inference.server.port"),
        lambda host, port: [reachable(f"http://{netloc(host, port)}")],
    ),
    KeyLink("orchestrator.engines.start_timeout_s", ("start_timeout_s",), lambda seconds: seconds),
    KeyLink("trainer.orchestrator.endpoint", ("orchestrator.server.endpoint",), reachable),
    KeyLink("trainer.orchestrator.keys_dir", ("orchestrator.server.keys_dir",), lambda folder: folder),
    KeyLink("trainer.weights.keys_dir", ("orchestrator.server.keys_dir",), lambda folder: folder),
    KeyLink("inference.weights.keys_dir", ("trainer.weights.keys_dir",), lambda folder: folder),
    KeyLink("inference.vllm.max_lora_rank", ("trainer.model.lora.rank",), lambda rank: rank),
    KeyLink("trainer.orchestrator.connect_timeout_s", ("start_timeout_s",), lambda seconds: seconds),
    KeyLink("trainer.max_steps", ("orchestrator.max_steps",), lambda steps: steps),
)

FREE_PORTS = ("inference.server.port", "orchestrator.server.endpoint")
"""Keys whose port 0 becomes a free port here, because another service must be told."""


class PolicyConfig(Config):
    """The model that the run trains."""

    path: Path
    """Hugging Face folder to start from."""


class RlConfig(Config):
    """`rl`: start all services of one machine, watch them, stop them together.

    Other commands: `rl view RUN` (look inside), `rl report RUN` (as a file), `rl doctor RUN`, `rl keys DIR`."""

    run: RunConfig = RunConfig()
    """Which run this is: its name, and the folder that holds all runs."""
    log: LogConfig = LogConfig()
    """What all services print, and write to `logs/<service>.log` of the run directory."""
    metrics: MetricsConfig = MetricsConfig()
    """Where the metrics of all services go besides `metrics/<service>.jsonl`."""
    model: PolicyConfig
    """The model that the run trains, serves and plays with."""
    max_steps: int | None = Field(None, gt=0)
    """Steps of the run; by default what the services say."""
    seed: int | None = Field(None, ge=0)
    """Seed of all services; by default what the services say."""
    stall_timeout_s: Advanced[float] = Field(900.0, gt=0)
    """Seconds without progress after which a service dumps its stacks and exits with code 75."""
    admin_token_file: Path | None = None
    """Token for the engines' admin routes; by default made in the run directory."""
    trainer_ranks: int = Field(1, gt=0)
    """Processes of the trainer; more than one are started by torchrun."""
    prepare: tuple[str, ...] = ()
    """Command that makes `model.path`; run first if that folder does not exist. `python` is this interpreter."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Seconds that the services may take to become healthy."""
    grace_s: Advanced[float] = Field(30.0, gt=0)
    """Seconds that each service gets to end after SIGTERM, before SIGKILL."""
    dry_run: bool = False
    """Print the resolved config of all services and exit."""

    @model_validator(mode="before")
    @classmethod
    def _fill_services(cls, data: Any) -> Any:
        services = {
            name: field.annotation
            for name, field in cls.model_fields.items()
            if isinstance(field.annotation, type) and issubclass(field.annotation, ServiceConfig)
        }
        return fill_services(data, cls, services, free_port) if isinstance(data, dict) else data

    @property
    def services(self) -> dict[str, ServiceConfig]:
        """The config of each service, by name."""
        return {name: value for name, value in self if isinstance(value, ServiceConfig)}


def compose(specs: tuple[ServiceSpec, ...]) -> type[RlConfig]:
    """`RlConfig` with a table per service."""
    tables: dict[str, Any] = {spec.name: (_table_of(spec), Field(description=_about(spec))) for spec in specs}
    composed: type[RlConfig] = create_model("RlConfig", __base__=RlConfig, __doc__=RlConfig.__doc__, **tables)
    return composed


def _table_of(spec: ServiceSpec) -> object:
    """The config class; what flows into it from elsewhere is advanced in the help of `rl`."""
    targets = {link.target.removeprefix(f"{spec.name}.") for link in LINKS if link.target.startswith(f"{spec.name}.")}
    shared = {key.name for key in config_keys(RlConfig) if key.name.split(".")[0] in (*SHARED_KEYS, "dry_run")}
    return Annotated[spec.config_class, AdvancedKey(frozenset(targets | shared))]


def _about(spec: ServiceSpec) -> str:
    return f"Settings of `{spec.name}`, as in a file of its own; what stands at the top level flows in."


def fill_services(
    data: Tree, config_class: type[Config], services: Mapping[str, type[ServiceConfig]], port: Callable[[], int]
) -> Tree:
    """`data` with shared keys and links written into the tables of the services. Pure, but for `port`."""
    filled = {"admin_token_file": default_token_file(data), **data}
    for name, service_class in services.items():
        own = data.get(name, {})
        if isinstance(own, dict):  # anything else is reported by the validation that follows
            filled[name] = merge(_inherited(filled, service_class), own)
    for key in FREE_PORTS:
        address = get_value(filled, config_class, key)
        if address is not None and str(address).rpartition(":")[2] in ("0", "*"):
            filled = set_value(filled, key, f"{str(address).rpartition(':')[0]}:{port()}".lstrip(":"))
    known = {key.name for key in config_keys(config_class)}
    for link in LINKS:
        if link.target in known and get_value(data, None, link.target) is None:
            filled = _apply(link, filled, config_class)
    return filled


def default_token_file(data: Tree) -> str | None:
    """The admin token of the run directory that `data` names; `None` if it names none that is valid."""
    try:
        return str(RunDir(RunConfig.model_validate(data.get("run", {})).path).admin_token)
    except ValueError:
        return None


def _inherited(data: Tree, service_class: type[ServiceConfig]) -> Tree:
    """The shared keys that `service_class` has; of a table only those members that it has."""
    inherited: Tree = {}
    for key in SHARED_KEYS:
        field = service_class.model_fields.get(key)
        value = data.get(key)
        if field is None or value is None:
            continue
        members = getattr(field.annotation, "model_fields", None)
        if members is not None and isinstance(value, dict):
            value = {member: inner for member, inner in value.items() if member in members}
        inherited[key] = value
    return inherited


def _apply(link: KeyLink, data: Tree, config_class: type[Config]) -> Tree:
    values = [get_value(data, config_class, source) for source in link.sources]
    return data if None in values else set_value(data, link.target, link.compute(*values))


def free_port() -> int:
    """A TCP port of loopback that is not bound now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


REFERENCE_HEAD = """# Configuration

Every key of every service, made from the config classes by `python -m runtime.launch.rl_config`; a test compares the
two. A key may stand in a TOML file (`service @ file.toml`) or on the command line (`--optimizer.lr 5e-4`); later ones
win, an unknown one is an error that names the nearest. `--dry-run` prints what is in force. `--help` leaves out the
keys that are marked *Advanced* here, `--help-all` has them.

"""


def reference() -> str:
    """The page of `rl` and of every installed service."""

    classes = {"rl": RlConfig} | {spec.name: spec.config_class for spec in find_services()}
    return REFERENCE_HEAD + "\n".join(f"## `{name}`\n\n{config_reference(cls)}" for name, cls in classes.items())


if __name__ == "__main__":
    sys.stdout.write(reference())
