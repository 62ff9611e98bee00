"""The numbers of the fault tests, small unless they are given, and what all of these tests share.

    pytest tests/faults -m long --kills 200 --frames 1000000 --minutes 30

is the long form (`make faults`): the same tests with larger numbers. Services are imported once for all tests, and
forked for each start; one start in twenty of the long form is cold.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults.exactly_once.kills import make_model
from tests.support.nursery import Nursery, nursery
from tests.support.once import Once

Figures = Mapping[str, Any]
Record = Callable[[str, Figures], None]

FULL = {"kills": 200, "frames": 1_000_000, "minutes": 30.0}
"""Figures of fewer are printed, but not kept."""
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "faults.json"
COLD_SHARE = 0.05


def pytest_addoption(parser: pytest.Parser) -> None:
    """Only read where this folder is named on the command line."""
    group = parser.getgroup("faults", "larger numbers for tests that are marked `long`")
    group.addoption("--kills", type=int, help="kills of services, and of saves; a tenth as many frozen peers")
    group.addoption("--frames", type=int, help="hostile messages")
    group.addoption("--minutes", type=float, help="of a soak; a third of them for a frozen trainer")


def given(config: pytest.Config) -> dict[str, Any]:
    """The numbers that were given on the command line."""
    return {name: value for name in FULL if (value := config.getoption(name, None)) is not None}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What was asked to take long may take long."""
    for item in items if given(config) else ():
        item.add_marker(pytest.mark.timeout(0), append=False)


@pytest.fixture
def kills(pytestconfig: pytest.Config) -> int | None:
    """`--kills`, in the long form."""
    return given(pytestconfig).get("kills")


@pytest.fixture
def frames(pytestconfig: pytest.Config) -> int | None:
    """`--frames`, in the long form."""
    return given(pytestconfig).get("frames")


@pytest.fixture
def minutes(pytestconfig: pytest.Config) -> float | None:
    """`--minutes`, in the long form."""
    return given(pytestconfig).get("minutes")


@pytest.fixture
def record(pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]) -> Record:
    """`record(section, figures)`: print them in the long form, and keep those of full numbers in `RESULTS`."""
    numbers = given(pytestconfig)

    def write(section: str, figures: Figures) -> None:
        if not numbers:
            return
        with capsys.disabled():
            print(f"\n{section}: {json.dumps(figures)}")
        if all(numbers.get(name, 0) >= full for name, full in FULL.items()):
            sections = json.loads(RESULTS.read_text()) | {section: {"measured": circumstances(), **figures}}
            RESULTS.write_text(json.dumps(sections, indent=2, sort_keys=True, allow_nan=False) + "\n")

    return write


def circumstances() -> Figures:
    """When and on what machine."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


@pytest.fixture(scope="session")
def nurseries(pytestconfig: pytest.Config) -> Iterator[dict[str, Nursery]]:
    """Orchestrator and trainer: those of all tests, or, in the long form, some whose starts are cold now and then."""
    services = ("orchestrator", "trainer")
    with ExitStack() as stack:
        if given(pytestconfig):
            yield {name: stack.enter_context(Nursery(name, COLD_SHARE)) for name in services}
        else:
            yield {name: nursery(name) for name in services}


@pytest.fixture(scope="session")
def random_model(once: Once) -> Path:
    """A tiny model with random weights."""
    return once("random-model", make_model)
