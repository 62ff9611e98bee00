"""Columns of saved rollouts: which, in which order, from both drivers, and what stops the run."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat.tokenizer import Tokenizer
from orchestrator.config.envs import EnvConfig
from orchestrator.envs.outcome import REQUIRED_COLUMNS, read_columns, saved_columns
from orchestrator.errors import StateColumnError
from orchestrator.records.rollout_log import RolloutLog, rollout_log_path
from orchestrator.values.batch import AssembledBatch
from orchestrator.values.group import FinalGroup, GroupKey, ScoredGroup, Ticket
from orchestrator.values.rollout import Rollout
from runtime.errors import ExitCode
from tests.orchestrator.envs.test_verifiers import DRIVERS, only, request_for, running, saying
from transport.wire.ledger import CompletedPositions

names = st.sampled_from(["trajectory", "sampling_args", "a", "b", "c"])


@given(st.lists(names))
def test_required_columns_come_first_duplicates_go_and_the_order_stays(extra: list[str]) -> None:
    columns = saved_columns(extra)
    assert columns[:2] == REQUIRED_COLUMNS
    assert len(set(columns)) == len(columns)
    assert set(columns) == set(extra) | set(REQUIRED_COLUMNS)
    asked = [name for name in extra if name not in REQUIRED_COLUMNS]
    assert list(columns[2:]) == sorted(set(asked), key=asked.index)


def test_columns_are_json_in_the_order_of_the_config() -> None:
    state = {"b": [1, None, "x"], "a": {"day": date(2026, 1, 2)}, "unused": object()}
    columns = read_columns("env", ["b", "trajectory", "a", "b"], state)
    assert {name: bytes(value) for name, value in columns.items()} == {
        "b": b'[1,null,"x"]',
        "a": b'{"day":"2026-01-02"}',
    }
    assert list(columns) == ["b", "a"]


def looped() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize("value", [object(), {1: object()}, [lambda: 0], looped(), 10**30 * 1j])
def test_what_cannot_be_written_is_an_error_with_the_columns_name(value: object) -> None:
    with pytest.raises(StateColumnError, match=r"env 'race'.*'notes' cannot be saved") as caught:
        read_columns("race", ["notes"], {"notes": value})
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_missing_column_is_an_error_that_says_what_there_is() -> None:
    with pytest.raises(StateColumnError, match=r"env 'race'.*no column 'note' \(it has artifacts, notes\)"):
        read_columns("race", ["note"], {"notes": 1, "artifacts": {}})


@DRIVERS
@pytest.mark.usefixtures("env_modules")
async def test_the_state_is_saved_with_the_rollout(tokenizer: Tokenizer, driver: str, tmp_path: Path) -> None:
    config = EnvConfig(id="edge-notes", driver=driver, state_columns=("seen", "trajectory", "best", "seen"))
    async with running(config, saying(tokenizer, "abc"), tokenizer) as adapter:
        rollout = only(await adapter.run(request_for(adapter)))
    columns = list(saved_row(tmp_path, rollout)["state_columns"].items())
    assert columns == [
        (
            "trajectory",
            [
                {
                    "num_tokens": len(rollout.branches[0].token_ids),
                    "num_sampled_tokens": 4,
                    "versions": [[0, len(rollout.branches[0].token_ids) - 4, len(rollout.branches[0].token_ids)]],
                }
            ],
        ),
        ("sampling_args", {"temperature": 0.9, "max_tokens": 16, "seed": 11}),
        ("seen", ["abc"]),
        ("best", {"text": "abc"}),
    ]


@DRIVERS
@pytest.mark.usefixtures("env_modules")
@pytest.mark.parametrize(("column", "said"), [("sen", "no column 'sen'"), ("handle", "'handle' cannot be saved")])
async def test_a_bad_column_stops_the_run_at_the_first_rollout(
    tokenizer: Tokenizer, driver: str, column: str, said: str
) -> None:
    config = EnvConfig(id="edge-notes", driver=driver, state_columns=(column,))
    async with running(config, saying(tokenizer, "abc"), tokenizer) as adapter:
        with pytest.raises(StateColumnError, match=rf"env 'edge-notes'.*{said}"):
            await adapter.run(request_for(adapter))


def saved_row(folder: Path, rollout: Rollout) -> dict[str, Any]:
    ticket = Ticket(GroupKey(rollout.env_name, rollout.example_id, 0), 0, 1, False, 0)
    RolloutLog(folder).write(
        AssembledBatch(1, (ScoredGroup(FinalGroup(ticket, (rollout,)), (1.0,), None),), CompletedPositions(1))
    )
    row: dict[str, Any] = json.loads(rollout_log_path(folder, 1).read_text())
    return row
