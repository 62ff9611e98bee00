"""Configuration of a service: `@ file.toml` plus dotted flags into a frozen pydantic model.

`ServiceConfig` holds what all services share. `load_config` is the one way from a command line to a config: it prints
the resolved config on `--dry-run`, and turns every mistake into a `UserError` that names the key.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field, model_validator
from pydantic_config import BaseConfig, ConfigFileError, cli

from runtime.config.help import config_help
from runtime.config.keys import Advanced, is_sequence
from runtime.config.validation_errors import describe_config_error
from runtime.errors import UserError


class Config(BaseConfig):  # type: ignore[misc]
    """Base of all config classes: unknown keys and numbers that are not finite are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_sequences(cls, data: Any) -> Any:
        """A sequence on the command line is JSON (`'["a", "b"]'`) or separated by commas (`a,b`)."""
        if not isinstance(data, dict):
            return data
        return {name: _split(name, value) if _is_sequence_field(cls, name) else value for name, value in data.items()}

    @model_validator(mode="before")
    @classmethod
    def _keep_the_defaults_of_tables(cls, data: Any) -> Any:
        """A table that is given in part keeps what its field sets for the rest: `--health.host` leaves the port."""
        if not isinstance(data, dict):
            return data
        return {
            name: {**_default_table(cls, name), **value} if isinstance(value, dict) else value
            for name, value in data.items()
        }


def _default_table(config_class: type[BaseConfig], name: str) -> dict[str, Any]:
    field = config_class.model_fields.get(name)
    default = None if field is None else field.default
    return {key: getattr(default, key) for key in default.model_fields_set} if isinstance(default, Config) else {}


def _is_sequence_field(config_class: type[BaseConfig], name: str) -> bool:
    field = config_class.model_fields.get(name)
    return field is not None and is_sequence(field.annotation)


def _split(name: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith("["):
        return [part.strip() for part in value.split(",") if part.strip()]
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error


class RunConfig(Config):
    """Which run this process belongs to."""

    name: str = Field("default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run: its folder below `dir`, and the `run_id` that peers must share."""
    dir: Path = Path("runs")
    """Folder that holds all runs."""

    @property
    def path(self) -> Path:
        """The run directory, `dir/name`."""
        return self.dir / self.name


class LogConfig(Config):
    """What a service logs, and in which form."""

    level: Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that is printed."""
    json_lines: Advanced[bool] = False
    """Print one JSON object per line instead of text."""


class HealthConfig(Config):
    """The `/health` and `/metrics` endpoint."""

    host: str = "127.0.0.1"
    """Address to bind. The endpoint only tells, and tells no secrets; beyond loopback it is logged at start."""
    port: int = Field(0, ge=0, le=65535)
    """TCP port; 0 lets the system choose (the run directory's `services/*.json` says which)."""


class WandbConfig(Config):
    """Where and how metrics go to Weights & Biases (extra `wandb`)."""

    project: str = Field(min_length=1)
    """Project; the run's name is the group in it, and every service a run."""
    entity: str | None = None
    """Team or user; unset: the account's default."""
    mode: Advanced[Literal["online", "offline"]] = "online"
    """`offline` writes below `metrics/wandb`, for `wandb sync` later."""


class TrackioConfig(Config):
    """Where and how metrics go to trackio (extra `trackio`)."""

    project: str = Field(min_length=1)
    """Project; the run's name is the group in it, and every service a run."""
    space_id: Advanced[str | None] = None
    """Hugging Face Space to log to; unset: `metrics/trackio` of the run directory."""


class MetricsConfig(Config):
    """Where metrics go besides `metrics/<service>.jsonl`, which is always written."""

    tensorboard: bool = True
    """Also write TensorBoard event files (needs the `torch` extra; skipped with one warning without it)."""
    wandb: WandbConfig | None = None
    """Also log to Weights & Biases; unset: not."""
    trackio: TrackioConfig | None = None
    """Also log to trackio; unset: not."""


class ServiceConfig(Config):
    """Keys that every service has."""

    run: RunConfig = RunConfig()
    """Which run this is: its name, and the folder that holds all runs."""
    log: LogConfig = LogConfig()
    """What is printed, and written to `logs/<service>.log` of the run directory."""
    health: HealthConfig = HealthConfig()
    """Endpoint with `/health`, `/live`, `/ready` and, for Prometheus, `/metrics`."""
    metrics: MetricsConfig = MetricsConfig()
    """Where metrics go besides `metrics/<service>.jsonl` of the run directory."""
    stall_timeout_s: Advanced[float] = Field(900.0, gt=0)
    """Seconds without progress after which the service dumps its stacks and exits with code 75."""
    dry_run: bool = False
    """Print the resolved config as JSON and exit."""

    @model_validator(mode="before")
    @classmethod
    def _check_is_table(cls, data: Any) -> Any:
        if not isinstance(data, (dict, cls)):
            raise ValueError(f"expected a table, got {type(data).__name__}")
        return data


ConfigT = TypeVar("ConfigT", bound=ServiceConfig)
ParsedT = TypeVar("ParsedT", bound=Config)


def load_config(config_class: type[ConfigT], argv: Sequence[str], *, prog: str) -> ConfigT:
    """The config that `argv` describes. Raises `UserError`; on `--dry-run` and `--help` prints and exits 0."""
    config = parse_config(config_class, argv, prog=prog)
    if config.dry_run:
        sys.stdout.write(resolved_json(config) + "\n")
        raise SystemExit(0)
    return config


def parse_config(config_class: type[ParsedT], argv: Sequence[str], *, prog: str) -> ParsedT:
    """`argv` (`@ file.toml --key value ...`, later ones win) as a config. Raises `UserError` with one line.

    On `--help` prints the keys that are not advanced, on `--help-all` all, and exits 0.
    """
    if not {"--help", "-h", "--help-all"}.isdisjoint(argv):
        sys.stdout.write(config_help(config_class, prog, with_advanced="--help-all" in argv))
        raise SystemExit(0)
    if argv and not argv[0].startswith(("-", "@")):
        raise UserError(f"{argv[0]} is not a command of `{prog}`; a config file is given as `{prog} @ FILE`")
    try:
        config: ParsedT = cli(config_class, args=list(argv), prog=prog)
    except ConfigFileError as error:
        raise UserError(describe_config_error(error, config_class)) from error
    except (OSError, ValueError) as error:  # a file that cannot be read; a value that is not the JSON it looks like
        raise UserError(f"cannot read the config: {error}") from error
    except AttributeError as error:  # what the library meets in a JSON file that holds a list, say
        raise UserError(f"cannot read the config: a file must hold a table of keys ({error})") from error
    return config


def resolved_json(config: Config) -> str:
    """The config with all defaults filled in, as JSON: a file that the service loads with `@`."""
    return json.dumps(config.model_dump(mode="json", exclude={"dry_run"}), indent=2)
