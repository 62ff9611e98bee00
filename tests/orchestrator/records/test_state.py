"""Where a run continues: derived from outbox and state, whatever instant the kill came at.

The history of a run with a curriculum, and the shares of what was trained.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from orchestrator.batches.batcher import BatchWriter
from orchestrator.data.curriculum import Curricula
from orchestrator.data.examples import EnvShare
from orchestrator.errors import StateMismatchError
from orchestrator.orchestrator import open_outbox
from orchestrator.records.history import HISTORY_NAME, History
from orchestrator.records.ledger import LEDGER_NAME, Ledger, read_ledger
from orchestrator.records.rollout_log import RolloutLog
from orchestrator.records.state import BatchState, describe_order, load_state, save_state
from orchestrator.records.state import resume as resume_from
from orchestrator.report.metrics import SelectionBias, selection_bias, selection_bias_metrics
from orchestrator.values.group import AssembledBatch, ScoredGroup
from runtime.errors import UserError
from runtime.run_dir.run_dir import RunDir
from tests.orchestrator.builders import ENV_ERROR, make_group, make_rollout, make_scored, make_ticket
from tests.orchestrator.data.test_curriculum import make_curriculum, scored
from transport.outbox.outbox import Outbox, batch_path
from transport.wire.ledger import CompletedPositions, tally

ORDER = describe_order(0, [EnvShare("copy", 40, 1.0)])

STATE = BatchState(run_id="run", order=ORDER, step=5, begin=70, end=93)


def resume(state: BatchState | None, next_step: int, *, run_id: str = "run", order: str = ORDER) -> CompletedPositions:
    return resume_from(state, next_step, run_id=run_id, order=order)


def test_a_fresh_run_begins_at_the_beginning() -> None:
    assert resume(None, 1) == CompletedPositions()


def test_a_batch_that_is_durable_is_never_cut_again() -> None:
    assert resume(STATE, next_step=6) == CompletedPositions(93)


def test_a_batch_that_is_not_durable_is_cut_again_from_its_beginning() -> None:
    assert resume(STATE, next_step=5) == CompletedPositions(70)


@pytest.mark.parametrize("next_step", [1, 4, 7])
def test_state_and_outbox_of_different_runs_are_refused(next_step: int) -> None:
    with pytest.raises(StateMismatchError, match=f"expects batch {next_step}"):
        resume(STATE, next_step)


def test_batches_without_a_state_are_refused() -> None:
    with pytest.raises(StateMismatchError, match="up to 3 but no state"):
        resume(None, 4)


def test_another_order_is_refused_and_both_are_named() -> None:
    with pytest.raises(StateMismatchError, match=r"started with seed 0.*now it has seed 1"):
        resume(STATE, 6, order=describe_order(1, [EnvShare("copy", 40, 1.0)]))


def test_the_state_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "orchestrator.json"
    assert load_state(path) is None
    save_state(path, STATE)
    assert load_state(path) == STATE
    path.write_text("{")
    with pytest.raises(StateMismatchError, match="cannot read"):
        load_state(path)


class Run:
    """The durable side of an orchestrator, opened from disk as after a start."""

    def __init__(self, folder: Path) -> None:
        self.state_path = folder / "state.json"
        self.outbox = Outbox(folder / "outbox", "run")
        self.done = resume_from(load_state(self.state_path), self.outbox.next_step, run_id="run", order=ORDER)
        self.ledger = Ledger(folder / LEDGER_NAME, self.done)
        history = History(folder / HISTORY_NAME, self.outbox.next_step, Curricula())
        self.writer = BatchWriter("run", ORDER, self.done, self.state_path, self.ledger, history, RolloutLog(None))

    @property
    def cursor(self) -> int:
        return self.done.cursor

    def next_batch(self) -> AssembledBatch:
        """A filtered group, then one that ships: two positions per batch."""
        for seq in (self.cursor, self.cursor + 1):
            self.ledger.dispatched(make_ticket(seq, size=2))
        groups = (make_scored(0, self.cursor, 2), make_scored(2, self.cursor + 1, 2))
        return AssembledBatch(self.outbox.next_step, groups, CompletedPositions(self.cursor + 2))

    def ship(self, *, kill_after: str = "") -> None:
        """Write batch N in the order of `state.py`, up to the instant of the kill."""
        assembled = self.next_batch()
        if kill_after == "dispatch":
            return
        self.ledger.settled(assembled)
        if kill_after == "ledger":
            self.ledger.flush()
            return
        batch = self.writer.prepare(assembled)
        if kill_after == "state":
            return
        self.outbox.put(batch)
        self.done = self.writer.done = assembled.done


@pytest.mark.parametrize("kill_after", ["dispatch", "ledger", "state", "outbox"])
def test_a_kill_at_any_instant_of_a_batch_loses_no_position_and_repeats_none(tmp_path: Path, kill_after: str) -> None:
    first = Run(tmp_path)
    first.ship()
    first.ship(kill_after=kill_after)
    second = Run(tmp_path)
    assert second.outbox.next_step == (3 if kill_after == "outbox" else 2)
    assert second.cursor == (4 if kill_after == "outbox" else 2)
    while second.outbox.next_step <= 3:
        second.ship()
    second.ledger.close()
    groups = [second.outbox.manifest(step).num_samples for step in second.outbox.steps()]
    assert groups == [2, 2, 2]
    result = tally(read_ledger(tmp_path / LEDGER_NAME))
    assert result.balances, result.problems
    assert {state: count for state, count in result.states.items() if "@" in state} == {
        "trained@1": 2,
        "trained@2": 2,
        "trained@3": 2,
    }
    assert result.states["cancelled"] == (0 if kill_after == "outbox" else 4)


def test_batches_of_another_version_are_a_users_mistake_that_no_restart_mends(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "golden")
    run_dir.outbox.mkdir(parents=True)
    older = Path(__file__).parents[2] / "golden" / "schema_2" / "batch.batch"
    shutil.copy(older, batch_path(run_dir.outbox, 12))
    with pytest.raises(UserError, match="schema version 2, this tandem-rl has 3: go on with the tandem-rl that wrote"):
        open_outbox(run_dir, "golden")


def group(seq: int, length: int, filtered: str | None = None, *, failed: bool = False) -> ScoredGroup:
    """Two rollouts of `length` sampled tokens, or one and a failure."""
    whole = make_group([0.0, ENV_ERROR] if failed else [0.0, 1.0], seq)
    results = tuple(
        make_rollout(0.0, length=length) if isinstance(result, type(make_rollout())) else result
        for result in whole.results
    )
    final = dataclasses.replace(whole, results=results)
    return ScoredGroup(final, (1.0,) * len(final.survivors), filtered)


GROUPS = (group(0, 10), group(1, 30, "stale"), group(2, 10, "zero_signal"), group(3, 40, failed=True))


def test_waste_counts_tokens_that_finished_and_rollouts_that_started() -> None:
    selection = selection_bias(GROUPS)
    assert selection == SelectionBias(
        num_started=8, num_finished=7, num_trained=3, finished_tokens=140, trained_tokens=60, stale_tokens=60
    )
    values = selection_bias_metrics("all", selection)
    assert values == {
        "waste/all/rollout_share": pytest.approx(5 / 8),
        "waste/all/share": pytest.approx(80 / 140),
        "waste/all/stale_share": pytest.approx(60 / 140),
        "length_bias/all/ratio": pytest.approx((60 / 3) / (140 / 7)),
    }


def test_nothing_is_said_of_what_did_not_happen() -> None:
    assert selection_bias_metrics("all", SelectionBias()) == {}
    assert selection_bias_metrics("all", SelectionBias(num_started=4)) == {"waste/all/rollout_share": 1.0}
    assert "length_bias/all/ratio" not in selection_bias_metrics("all", selection_bias([GROUPS[1]]))


def curricula() -> Curricula:
    return Curricula({"toy": make_curriculum(refresh_groups=1)})


def batch(step: int) -> AssembledBatch:
    return AssembledBatch(step, (scored(step - 1, [0.0, 1.0]),), CompletedPositions(step))


def write(path: Path, *steps: int) -> None:
    """As a run does: each group is seen before its batch is cut."""
    known = curricula()
    history = History(path, next_step=1, curricula=known)
    for step in steps:
        for group in batch(step).groups:
            known.saw(group)
        history.write(batch(step))


def test_a_restart_forgets_the_batch_that_did_not_become_durable(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write(path, 1, 2, 3)
    lines = path.read_bytes().splitlines()
    known = curricula()
    restarted = History(path, next_step=3, curricula=known)
    assert known.by_env["toy"].is_ready(3), "a draw that needs the outcomes of batches 1 and 2"
    assert not known.by_env["toy"].is_ready(4), "a draw that needs that of batch 3"
    restarted.write(AssembledBatch(3, (), CompletedPositions(3)))
    assert path.read_bytes().splitlines() == [*lines[:2], b'{"step":3}']
    History(path, next_step=4, curricula=curricula())


def test_a_batch_that_is_written_again_has_one_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write(path, 1, 2, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    History(path, next_step=3, curricula=curricula())


def test_a_torn_line_is_cut_off_and_nonsense_is_named(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write(path, 1)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step":2,"les')
    torn = History(path, next_step=2, curricula=curricula())
    torn.write(AssembledBatch(2, (), CompletedPositions(2)))
    assert path.read_bytes() == whole + b'{"step":2}\n'
    path.write_text("nonsense\n")
    with pytest.raises(StateMismatchError, match=r"cannot read the history .*history.jsonl"):
        History(path, next_step=2, curricula=curricula())


def test_the_sums_of_an_earlier_version_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"step":1,"selections":{"toy":{"num_started":8}},"lessons":{}}\n')
    History(path, next_step=2, curricula=curricula())
