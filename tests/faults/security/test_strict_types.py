"""Nothing that a peer sends may hold a field we do not know, however deep: every type of the wire says so itself."""

import msgspec
import pytest
from msgspec import inspect

from orchestrator.envs.workers.link import FromWorker, ToWorker
from transport.outbox.progress import ReportedProgress
from transport.wire.generation import ApplyWeights, GenerateReply, GenerateRequest, ScoreReply, ScoreRequest
from transport.wire.manifest import BatchManifest
from transport.wire.messages import ClientMessage, ServerMessage
from transport.wire.sample import TrainingSample

WIRE = {
    "link": (ClientMessage | ServerMessage, 25),
    "samples": (TrainingSample | None, 2),
    "manifests": (BatchManifest | None, 2),
    "engines": (GenerateRequest | None, 2),
    "replies": (GenerateReply | None, 2),
    "scoring": (ScoreRequest | None, 1),
    "scores": (ScoreReply | None, 1),
    "weights": (ApplyWeights | None, 1),
    "workers": (ToWorker | FromWorker, 15),
    "progress": (ReportedProgress | None, 2),
}
"""The types that are decoded, and how many there are at least in each, so that the walk cannot come back empty."""


class Lenient(msgspec.Struct):
    """What must be found."""


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    """A strict type around one that is not."""

    inner: dict[str, tuple[Lenient | None, ...]] | None = None


def structs(kind: inspect.Type) -> set[type]:
    """Every struct and dataclass within `kind`."""
    found: set[type] = set()
    waiting: list[object] = [kind]
    while waiting:
        match waiting.pop():
            case inspect.StructType(cls=cls, fields=fields) | inspect.DataclassType(cls=cls, fields=fields):
                if cls not in found:
                    found.add(cls)
                    waiting += [field.type for field in fields]
            case inspect.Type() as other:
                waiting += msgspec.structs.astuple(other)
            case tuple() as several:
                waiting += several
    return found


def lenient(kind: inspect.Type) -> list[str]:
    return sorted(each.__name__ for each in structs(kind) if not is_strict(each))


def is_strict(kind: type) -> bool:
    """Dataclasses cannot be."""
    return issubclass(kind, msgspec.Struct) and kind.__struct_config__.forbid_unknown_fields


@pytest.mark.parametrize("name", WIRE)
def test_every_type_of_the_wire_refuses_fields_that_it_does_not_know(name: str) -> None:
    kind, at_least = WIRE[name]
    assert len(structs(inspect.type_info(kind))) >= at_least
    assert lenient(inspect.type_info(kind)) == []


def test_a_lenient_type_is_found_however_deep_it_lies() -> None:
    assert lenient(inspect.type_info(list[Outer])) == ["Lenient"]
