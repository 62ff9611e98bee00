"""The services of one machine, found through the entry-point group `tandem.services`, without importing any by name."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points

from runtime.config import ServiceConfig
from runtime.errors import UserError

GROUP = "tandem.services"


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
    for entry in entry_points(group=GROUP):
        config_class = entry.load()
        if not (isinstance(config_class, type) and issubclass(config_class, ServiceConfig)):
            raise UserError(f"entry point {entry.name} of {GROUP} is not a ServiceConfig: {entry.value}")
        specs.append(ServiceSpec(entry.name, entry.module.split(".")[0], config_class))
    if not specs:
        raise UserError(f"no services installed (entry points {GROUP}); install tandem-rl with pip")
    return in_start_order(specs)


def in_start_order(specs: Iterable[ServiceSpec]) -> tuple[ServiceSpec, ...]:
    """Those that only serve, then those that end by themselves; by name among equals."""
    return tuple(sorted(specs, key=lambda spec: (spec.ends_by_itself, spec.name)))
