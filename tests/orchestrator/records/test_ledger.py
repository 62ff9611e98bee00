"""The ledger: every dispatched rollout has exactly one fate, through any crash."""

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from orchestrator.batches.assembler import BatchAssembler
from orchestrator.batches.staleness_policy import WaitPolicy
from orchestrator.errors import LedgerError
from orchestrator.records.ledger import LEDGER_NAME, Ledger, read_ledger, terminal_states
from orchestrator.records.ledger_report import collapse, print_ledger, report_ledger
from orchestrator.values.group import AssembledBatch, ScoredGroup
from orchestrator.values.rollout import FailureReason, RolloutFailure
from runtime.errors import UserError
from tests.orchestrator.batches.batch_simulation import kill
from tests.orchestrator.builders import ENV_ERROR, make_group, make_scored, make_ticket
from transport.wire.ledger import Cancelled, CancelReason, CompletedPositions, Dispatched, Record, Settled, tally


def ledger_path(tmp_path: Path) -> Path:
    (tmp_path / "ledger").mkdir(exist_ok=True)
    return tmp_path / "ledger" / LEDGER_NAME


def one_batch(step: int, *groups: ScoredGroup) -> AssembledBatch:
    return AssembledBatch(step, groups, CompletedPositions(groups[-1].seq + 1))


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(st.sampled_from(["dispatch", "retry", "final", "batch", "crash", "lose_batch"]), max_size=60),
    data=st.data(),
)
def test_whatever_happens_the_ledger_balances(
    events: list[str], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("ledger") / LEDGER_NAME
    done, assembler, ledger, num_dispatched = (
        CompletedPositions(),
        BatchAssembler(WaitPolicy(4, 2, 9, max_steps=100), 1, CompletedPositions()),
        Ledger(path, CompletedPositions()),
        0,
    )
    open_seqs: list[int] = []
    for event in events:
        if event == "dispatch":
            ticket = make_ticket(assembler.tail, size=2)
            assembler.dispatch(ticket)
            ledger.dispatched(ticket)
            open_seqs.append(ticket.seq)
            num_dispatched += 2
        elif event == "retry" and open_seqs:
            ledger.retried(make_ticket(data.draw(st.sampled_from(open_seqs)), size=2), 1, ENV_ERROR)
            num_dispatched += 1
        elif event == "final" and open_seqs:
            seq = data.draw(st.sampled_from(open_seqs))
            open_seqs.remove(seq)
            assembler.add_final(make_scored(data.draw(st.integers(0, 2)), seq, 2))
        elif event in ("batch", "lose_batch") and assembler.complete:
            batch = assembler.complete.popleft()
            ledger.settled(batch)
            ledger.flush()
            done = batch.done if event == "batch" else done
        if event in ("crash", "lose_batch"):
            kill(ledger)
            ledger, assembler, open_seqs = (
                Ledger(path, done),
                BatchAssembler(WaitPolicy(4, 2, 9, max_steps=100), assembler.next_step, done),
                [],
            )
    ledger.close()
    result = tally(read_ledger(path))
    assert result.balances, result.problems
    assert result.num_dispatched == num_dispatched


def test_every_result_has_its_state() -> None:
    stale, cancelled = (RolloutFailure(reason, "") for reason in (FailureReason.STALE, FailureReason.CANCELLED))
    group = ScoredGroup(make_group([0.0, 1.0, ENV_ERROR, stale, cancelled]), (-1.0, 1.0), None)
    assert terminal_states(group, 3) == ("trained@3", "trained@3", "failed:env_error", "stale", "cancelled")
    filtered = ScoredGroup(make_group([1.0, ENV_ERROR]), (0.0,), "zero_signal")
    assert terminal_states(filtered, 3) == ("filtered:zero_signal", "failed:env_error")


def test_what_was_in_flight_at_a_kill_is_cancelled_at_the_restart(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    killed = Ledger(path, CompletedPositions())
    for seq in range(3):
        killed.dispatched(make_ticket(seq, size=2))
    killed.settled(one_batch(1, make_scored(2, 0, 2)))
    killed.flush()
    assert tally(read_ledger(path)).states == {"trained@1": 2, "in_flight": 4}
    restarted = Ledger(path, CompletedPositions(1))
    restarted.dispatched(make_ticket(1, size=2))
    assert tally(read_ledger(path)).states == {"trained@1": 2, "cancelled": 4, "in_flight": 2}
    restarted.close()


def test_a_batch_that_did_not_become_durable_is_taken_back(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    killed = Ledger(path, CompletedPositions())
    killed.dispatched(make_ticket(0, size=2))
    killed.settled(one_batch(1, make_scored(2, 0, 2)))
    killed.flush()
    Ledger(path, CompletedPositions(0)).close()
    result = tally(read_ledger(path))
    assert result.balances
    assert result.states == {"cancelled": 2}


def test_a_torn_line_is_cut_off_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    Ledger(path, CompletedPositions()).dispatched(make_ticket(0, size=2))
    with path.open("ab") as file:
        file.write(b'{"kind":"dispatched","seq":1,"gro')
    assert len(list(read_ledger(path))) == 1
    Ledger(path, CompletedPositions(0)).close()
    assert [type(record) for record in read_ledger(path)] == [Dispatched, Cancelled]


def test_a_ledger_that_is_one_torn_line_starts_empty(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    path.write_bytes(b"x" * 10_000)
    Ledger(path, CompletedPositions(0)).close()
    assert tally(read_ledger(path)).num_dispatched == 0


def test_a_full_disk_keeps_the_lines_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ledger_path(tmp_path)
    ledger = Ledger(path, CompletedPositions())

    def full(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        ledger.dispatched(make_ticket(0, size=2))
        with pytest.raises(OSError, match="No space"):
            ledger.flush()
    assert path.read_bytes() == b""
    ledger.close()
    assert tally(read_ledger(path)).num_dispatched == 2


CONTRADICTIONS: list[tuple[list[Record], str]] = [
    ([Dispatched(0, "a/0/0", 2), Dispatched(0, "a/0/0", 2)], "dispatched twice"),
    ([Settled(0, ("trained@1",))], "not dispatched"),
    ([Dispatched(0, "a/0/0", 2), Settled(0, ("trained@1",))], "1 states"),
    ([Dispatched(0, "a/0/0", 1), Settled(0, ("stale",)), Settled(0, ("stale",))], "not dispatched"),
    ([Dispatched(0, "a/0/0", 1), Cancelled(0, CancelReason.RESTART), Settled(0, ("stale",))], "not dispatched"),
]


@pytest.mark.parametrize(("records", "problem"), CONTRADICTIONS)
def test_contradictions_are_found(records: list[Record], problem: str) -> None:
    result = tally(records)
    assert not result.balances
    assert problem in result.problems[0]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    path.write_text('{"kind":"dispatched","seq":0,"group":"a/0/0","size":2}\nnonsense\n')
    with pytest.raises(LedgerError, match="line 2 of"):
        tally(read_ledger(path))


def test_the_report_prints_the_table_and_its_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ledger_path(tmp_path)
    ledger = Ledger(path, CompletedPositions())
    for seq in range(3):
        ledger.dispatched(make_ticket(seq, size=2))
    ledger.settled(one_batch(1, make_scored(2, 0, 2)))
    ledger.settled(one_batch(2, make_scored(0, 1, 2)))
    ledger.close()
    assert report_ledger(tmp_path) == 0
    printed = capsys.readouterr().out
    for text in ("trained@1..1", "failed:env_error", "in_flight", "balances"):
        assert text in printed, printed
    with path.open("a") as file:
        file.write('{"kind":"settled","seq":0,"states":["stale"]}\n')
    assert report_ledger(tmp_path) == 1
    assert "does not balance" in capsys.readouterr().out


def test_many_problems_are_summed_up() -> None:
    console = Console(record=True, width=100)
    print_ledger(tally([Settled(seq, ("stale",)) for seq in range(30)]), console)
    assert "and 10 more" in console.export_text()


def test_states_are_collapsed_for_people() -> None:
    states = Counter({"trained@2": 8, "trained@10": 8, "stale": 1, "cancelled": 2})
    assert collapse(states) == {"trained@2..10": 16, "cancelled": 2, "stale": 1}


def test_a_run_without_a_ledger_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no ledger in"):
        report_ledger(tmp_path)


def test_a_retried_rollout_is_two_dispatches_with_a_state_each(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    ledger = Ledger(path, CompletedPositions())
    ledger.dispatched(make_ticket(0, size=2))
    ledger.retried(make_ticket(0, size=2), 1, ENV_ERROR)
    assert tally(read_ledger(path)).states == {"failed:env_error": 1, "in_flight": 2}
    ledger.settled(one_batch(1, make_scored(2, 0, 2)))
    ledger.close()
    result = tally(read_ledger(path))
    assert result.balances
    assert (result.num_dispatched, result.states) == (3, {"failed:env_error": 1, "trained@1": 2})


def test_a_failed_try_stays_failed_when_its_group_is_cancelled(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    killed = Ledger(path, CompletedPositions())
    killed.dispatched(make_ticket(0, size=2))
    killed.retried(make_ticket(0, size=2), 0, ENV_ERROR)
    Ledger(path, CompletedPositions(0)).close()
    result = tally(read_ledger(path))
    assert result.balances
    assert result.states == {"failed:env_error": 1, "cancelled": 2}


@pytest.mark.parametrize(("seq", "index"), [(0, 2), (1, 0)])
def test_a_retry_of_what_does_not_run_is_a_contradiction(tmp_path: Path, seq: int, index: int) -> None:
    ledger = Ledger(ledger_path(tmp_path), CompletedPositions())
    ledger.dispatched(make_ticket(0, size=2))
    ledger.retried(make_ticket(seq, size=2), index, ENV_ERROR)
    ledger.close()
    result = tally(read_ledger(ledger_path(tmp_path)))
    assert result.problems == [f"rollout {index} at position {seq} was retried but was not running"]
