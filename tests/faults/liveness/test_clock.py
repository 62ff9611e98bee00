"""Row 23: the wall clock may jump at any time, so it only dates what people read. Deadlines use `time.monotonic`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import dotted, parsed, source_files
from tests.faults.liveness.run import port_of, toy_config, trainer_flags
from tests.orchestrator.toys import write_config
from tests.support.process import service

WALL_CLOCK = {
    *("time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime", "time.clock_gettime"),
    *("datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today"),
}

DATED = {
    "runtime/metrics/metric_log.py": "rows of metrics, names and heads of TensorBoard files",
    "runtime/launch/run_monitor.py": "rows from before the start of `rl` are shown as history",
    "orchestrator/envs/gateway.py": "`created` of an OpenAI reply",
    "chat/templates.py": "`strftime_now` of chat templates",
    "inference/server/chat_route.py": "`created` of an OpenAI reply",
    "inference/server/routes.py": "`created` of an OpenAI model card",
    "orchestrator/eval/command.py": "when an evaluation was made",
}
"""What the wall clock is asked for, by file. None of it decides how a run goes on."""


def wall_clock_uses(tree: ast.AST) -> Iterator[str]:
    """Every mention of the wall clock, whatever name it was imported under."""
    names = dict(_imported_names(tree))
    for node in ast.walk(tree):
        head, _, rest = dotted(node).partition(".")
        full = names.get(head, "") + (f".{rest}" if rest else "")
        if full in WALL_CLOCK:
            yield full


def _imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def test_wall_clock_is_asked_only_where_it_dates_something() -> None:
    asking = {str(path) for path in source_files() if any(wall_clock_uses(parsed(path)))}
    assert asking == set(DATED), "use time.monotonic, or list the file with what it dates"


def test_every_way_to_ask_is_recognized() -> None:
    source = """
import time
import datetime
from time import time as now, monotonic
from datetime import datetime as dt
time.time(); now(); datetime.datetime.now(); dt.utcnow(); field(default_factory=time.time_ns)
time.monotonic(); monotonic(); row.time(); dt(2020, 1, 1)
"""
    assert sorted(wall_clock_uses(ast.parse(source))) == [
        *("datetime.datetime.now", "datetime.datetime.utcnow", "time.time", "time.time", "time.time_ns"),
    ]


@pytest.mark.integration
def test_run_on_machines_whose_clocks_jump_comes_to_its_end(tmp_path: Path, model: Path) -> None:
    """Timeouts as short as a healthy run allows: one that counted wall time would strike at the first jump."""
    config = toy_config(tmp_path, max_steps=10, stall_timeout_s=30.0)
    flags = trainer_flags(config, model, port_of(config.server.endpoint), "--stall-timeout-s", "30")
    clock, toy = "tests.faults.liveness.jumping_clock", "tests.orchestrator.toy_service"
    with (
        service("orchestrator", config.run.path, clock, toy, "@", str(write_config(config, tmp_path))) as orchestrator,
        service("trainer", config.run.path, clock, "trainer", *flags) as trainer,
    ):
        assert trainer.wait() == 0, trainer.output
        assert orchestrator.wait() == 0, orchestrator.output
    assert "the run has ended after step 10" in trainer.output
