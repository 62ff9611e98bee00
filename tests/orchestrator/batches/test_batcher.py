"""The batcher: back-pressure, order of batches, and what happens when the disk refuses."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from chat.trajectory import Branch
from orchestrator.batches import batcher as batcher_module
from orchestrator.batches.assembler import BatchAssembler, to_samples
from orchestrator.batches.batcher import Batcher, BatchWriter, encoded_batch
from orchestrator.batches.staleness_policy import WaitPolicy
from orchestrator.config.algorithm import OpdAlgorithmConfig, RlAlgorithmConfig, SftAlgorithmConfig
from orchestrator.errors import InvariantError
from orchestrator.records.ledger import Ledger
from orchestrator.records.rollout_log import RolloutLog
from orchestrator.values.group import AssembledBatch, ScoredGroup, check_staleness
from orchestrator.values.rollout import PLAIN_RL, Rollout, TokenWeights, token_weights
from runtime.errors import StorageError
from runtime.health.health import Health
from tests.orchestrator.builders import make_group, make_ticket
from tests.support.waiting import until_async
from transport.backoff import Backoff
from transport.errors import OutboxError
from transport.outbox.outbox import Outbox
from transport.server.server import BatchServer
from transport.wire.codec import EncodedBatch, decode_batch, decode_sample, encode
from transport.wire.ledger import CompletedPositions
from transport.wire.sample import TrainingSample, VersionSpan


def scored(seq: int, version: int = 0) -> ScoredGroup:
    return ScoredGroup(make_group([0.0, 1.0], seq, version=version), (-1.0, 1.0), None)


class RefusingOutbox(Outbox):
    """A disk that is full for the first `num_refusals` batches."""

    num_refusals = 0

    def put(self, batch: EncodedBatch) -> None:
        if self.num_refusals:
            self.num_refusals -= 1
            raise OutboxError("No space left on device")
        super().put(batch)


class Bench:
    def __init__(self, folder: Path, server: BatchServer) -> None:
        self.server = server
        self.assembler = BatchAssembler(WaitPolicy(2, 2, 2, max_steps=4), next_step=1, done=CompletedPositions())
        self.ledger = Ledger(folder / "ledger.jsonl", CompletedPositions())
        self.health = Health("orchestrator", 60)
        self.steps: list[int] = []
        writer = BatchWriter(
            "run",
            "order",
            CompletedPositions(),
            folder / "state.json",
            self.ledger,
            None,
            RolloutLog(None),
        )
        self.batcher = Batcher(
            self.assembler,
            server,
            self.ledger,
            writer,
            self.health,
            max_ahead=2,
            max_steps=4,
            on_shipped=self.shipped,
        )

    async def shipped(self, batch: AssembledBatch) -> None:
        self.steps.append(batch.step)

    def add_groups(self, number: int) -> None:
        for _ in range(number):
            ticket = make_ticket(self.assembler.tail, size=2)
            self.assembler.dispatch(ticket)
            self.ledger.dispatched(ticket)
            self.assembler.add_final(scored(ticket.seq, version=ticket.seq))
        self.batcher.notify()

    async def poll(self, condition: Callable[[], bool]) -> None:
        await until_async(condition, 20)


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[Bench]:
    outbox = RefusingOutbox(folder / "outbox", "run")
    async with BatchServer("tcp://127.0.0.1:0", outbox) as server, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve())
        yield Bench(folder, server)
        serving.cancel()


async def test_no_more_batches_than_allowed_lie_untrained(tmp_path: Path) -> None:
    async with bench(tmp_path) as b, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(b.batcher.run())
        b.add_groups(4)
        await b.poll(lambda: "trainer to train step 1" in b.health.waits)
        assert b.server.outbox.steps() == [1, 2]
        assert b.steps == [1, 2]
        running.cancel()


async def test_it_ends_with_the_last_step(tmp_path: Path) -> None:
    async with bench(tmp_path) as b, asyncio.timeout(20):
        b.add_groups(2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(b.batcher.run())
            await b.poll(lambda: b.steps == [1, 2])
            b.server.outbox.retire(2)
            b.add_groups(2)
    assert b.steps == [1, 2, 3, 4]


async def test_a_full_disk_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher_module, "STORE_BACKOFF", Backoff(0.001, 1.0))
    async with bench(tmp_path) as b, asyncio.TaskGroup() as tasks:
        assert isinstance(b.server.outbox, RefusingOutbox)
        b.server.outbox.num_refusals = 3
        running = tasks.create_task(b.batcher.run())
        b.add_groups(1)
        await b.poll(lambda: b.steps == [1])
        running.cancel()
    assert b.server.outbox.steps() == [1]


async def test_a_disk_that_stays_full_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher_module, "STORE_BACKOFF", Backoff(0.001, 1.0))
    async with bench(tmp_path) as b:
        assert isinstance(b.server.outbox, RefusingOutbox)
        b.server.outbox.num_refusals = 1000
        b.add_groups(1)
        with pytest.raises(StorageError, match="batch 1 could not be stored in 5 tries"):
            await b.batcher.run()
        assert b.server.outbox.steps() == []


@pytest.mark.parametrize("num_cancels", [1, 3])
async def test_a_batch_that_has_begun_is_finished_when_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cancels: int
) -> None:
    monkeypatch.setattr(batcher_module, "STORE_BACKOFF", Backoff(0.05, 1.0))
    async with bench(tmp_path) as b:
        assert isinstance(b.server.outbox, RefusingOutbox)
        b.server.outbox.num_refusals = 1
        b.add_groups(1)
        running = asyncio.create_task(b.batcher.run())
        await b.poll(lambda: isinstance(b.server.outbox, RefusingOutbox) and b.server.outbox.num_refusals == 0)
        for _ in range(num_cancels):
            running.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert b.server.outbox.steps() == [1]


def test_samples_are_in_dispatch_order_and_carry_their_names() -> None:
    batch = AssembledBatch(
        2,
        (scored(5), ScoredGroup(make_group([1.0, 1.0], 6), (0.0, 0.0), "zero_signal"), scored(7)),
        CompletedPositions(8),
    )
    samples = decode_batch(encoded_batch("run", batch))
    assert [sample.trajectory_id for sample in samples] == ["copy/5/0#0", "copy/5/0#1", "copy/7/0#0", "copy/7/0#1"]
    assert [sample.advantages for sample in samples] == [-1.0, 1.0, -1.0, 1.0]
    assert {(sample.run_id, sample.group_id) for sample in samples} == {("run", "copy/5/0"), ("run", "copy/7/0")}


def test_a_stale_sample_never_ships() -> None:
    check_staleness(AssembledBatch(4, (scored(0, version=1),), CompletedPositions(1)), max_staleness=2)
    with pytest.raises(InvariantError, match="batch 5 holds a sample of staleness 3"):
        check_staleness(AssembledBatch(5, (scored(0, version=1),), CompletedPositions(1)), max_staleness=2)


def make_branch(sampled: list[bool], version: int = 7) -> Branch:
    mask = np.array(sampled)
    spans = tuple(VersionSpan(version, int(i), int(i) + 1) for i in np.flatnonzero(mask))
    logprobs = np.where(mask, -0.25, 0).astype(np.float32)
    return Branch(np.arange(len(sampled), dtype=np.int32), mask, logprobs, spans)


def samples_of(*branches: Branch, weights: TokenWeights = PLAIN_RL) -> list[TrainingSample]:
    rollout = Rollout(
        env_name="env",
        example_id="ex",
        reward=0.75,
        branches=branches,
        temperature=0.6,
        is_truncated=False,
        metrics={},
        messages=(),
        duration_s=0.1,
    )
    return to_samples(
        rollout, advantage=-1.5, run_id="run", group_id="env/ex/0", trajectory_id="env/ex/0#2", weights=weights
    )


def test_sample_trains_exactly_the_sampled_tokens() -> None:
    (sample,) = samples_of(make_branch([False, False, True, True]))
    sample.check()
    assert sample.loss_mask.numpy().tolist() == [False, False, True, True]
    assert sample.logprobs.numpy().tolist() == [0, 0, -0.25, -0.25]
    assert sample.token_ids.numpy().tolist() == [0, 1, 2, 3]
    assert sample.num_loss_tokens == 2
    assert (sample.advantages, sample.reward, sample.temperature) == (-1.5, 0.75, 0.6)
    assert sample.oldest_version == 7
    assert (sample.run_id, sample.env_name, sample.example_id) == ("run", "env", "ex")
    assert (sample.group_id, sample.trajectory_id) == ("env/ex/0", "env/ex/0#2")


def test_each_branch_is_a_step_of_the_same_trajectory() -> None:
    samples = samples_of(make_branch([False, True], 1), make_branch([False, True, True], 2))
    assert [sample.step_index for sample in samples] == [0, 1]
    assert [sample.oldest_version for sample in samples] == [1, 2]
    assert len({sample.trajectory_id for sample in samples}) == 1


def test_position_zero_is_never_trained() -> None:
    (sample,) = samples_of(make_branch([True, True]))
    assert sample.loss_mask.numpy().tolist() == [False, True]


def test_branch_that_trains_nothing_gives_no_sample() -> None:
    samples = samples_of(make_branch([False, False]), make_branch([True]), make_branch([False, True]))
    assert [sample.step_index for sample in samples] == [0]


def test_loss_mask_does_not_alias_the_branch() -> None:
    branch = make_branch([True, True])
    samples_of(branch)
    assert branch.sampled.tolist() == [True, True]


@pytest.mark.parametrize("length", [2, 5, 1000])
def test_sample_survives_the_wire(length: int) -> None:
    (sample,) = samples_of(make_branch([False, *[True] * (length - 1)]))
    received = decode_sample(encode(sample))
    assert received.token_ids.numpy().tolist() == sample.token_ids.numpy().tolist()
    assert received.versions == sample.versions


def stream(sample: TrainingSample, name: str) -> list[float] | None:
    tensor = getattr(sample, name)
    return None if tensor is None else tensor.numpy().tolist()


def make_two_turns() -> Branch:
    """Two prompt tokens, a reply of two, an answer of two by the environment, a reply of one."""
    branch = make_branch([False, False, True, True, False, False, True])
    return msgspec.structs.replace(
        branch,
        observed=np.array([False, False, False, False, True, True, False]),
        ref_logprobs=-np.arange(7, dtype=np.float32),
    )


def test_plain_reinforcement_has_no_weight_streams() -> None:
    (sample,) = samples_of(make_two_turns())
    names = ("rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs")
    assert [stream(sample, name) for name in names] == [None] * 4
    assert sample.num_loss_tokens == 3


def test_imitation_is_cross_entropy_at_temperature_1_without_behaviour_or_advantage() -> None:
    weights = token_weights(SftAlgorithmConfig(teacher="big", weight=0.5))
    (sample,) = samples_of(make_two_turns(), weights=weights)
    sample.check()
    assert stream(sample, "rl_weights") == [0.0] * 7
    assert stream(sample, "ce_weights") == [0, 0, 0.5, 0.5, 0, 0, 0.5]
    assert stream(sample, "ref_kl_weights") is None
    assert stream(sample, "logprobs") == [0.0] * 7
    assert sample.temperature == 1.0


def test_distillation_brings_the_teachers_log_probabilities_of_sampled_tokens() -> None:
    (sample,) = samples_of(make_two_turns(), weights=token_weights(OpdAlgorithmConfig(teacher="big", weight=2.0)))
    sample.check()
    assert stream(sample, "ref_kl_weights") == [0, 0, 2, 2, 0, 0, 2]
    assert stream(sample, "ref_logprobs") == [0, 0, -2, -3, 0, 0, -6]
    assert stream(sample, "rl_weights") == [0.0] * 7
    assert stream(sample, "ce_weights") is None
    assert stream(sample, "logprobs") == [0, 0, -0.25, -0.25, 0, 0, -0.25], "the importance weight needs them"
    assert sample.temperature == 0.6


def test_distillation_may_keep_the_reward() -> None:
    weights = token_weights(OpdAlgorithmConfig(teacher="big", rl_weight=0.25))
    (sample,) = samples_of(make_two_turns(), weights=weights)
    assert stream(sample, "rl_weights") == [0, 0, 0.25, 0.25, 0, 0, 0.25]
    assert sample.advantages == -1.5


def test_observation_training_adds_what_the_environment_wrote_between_turns() -> None:
    (sample,) = samples_of(make_two_turns(), weights=token_weights(RlAlgorithmConfig(observation_weight=0.1)))
    sample.check()
    assert sample.loss_mask.numpy().tolist() == [False, False, True, True, True, True, True]
    assert stream(sample, "rl_weights") == [0, 0, 1, 1, 0, 0, 1]
    assert stream(sample, "ce_weights") == pytest.approx([0, 0, 0, 0, 0.1, 0.1, 0])


def test_observation_training_of_a_single_turn_is_plain() -> None:
    (sample,) = samples_of(make_branch([False, True]), weights=TokenWeights(observation=0.1))
    assert (stream(sample, "rl_weights"), stream(sample, "ce_weights")) == (None, None)


def test_samples_with_weights_survive_the_wire() -> None:
    weights = TokenWeights(rl=0.5, ce=0.25, ref_kl=2.0, observation=0.1)
    (sample,) = samples_of(make_two_turns(), weights=weights)
    assert decode_sample(encode(sample)) == sample
