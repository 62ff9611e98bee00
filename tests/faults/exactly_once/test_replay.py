"""What a run has trained can be trained again without an orchestrator, and ends with the same bits.

Row 14 of the fault list: messages between trainer and orchestrator come twice, late, and in another order.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.chaos_proxy import ChaosProxy, Faults
from tests.faults.exactly_once.fixed_run import FixedRun
from tests.faults.exactly_once.kills import FIRST_ACT, Aim, Campaign, Reference
from tests.faults.exactly_once.signs import SIGNS, sha256, tensors_sha256
from tests.support.process import Process
from transport.durable import write_durably
from transport.outbox.outbox import BatchFile, batch_path, file_chunks
from transport.wire.codec import build_batch, decode_rows

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

DEADLINE_S = 120.0


def replay(run: FixedRun, recording: Path) -> tuple[str, str]:
    """Hashes of the weights and of the state that the recording leads to."""
    output = run.folder / f"{run.name}.log"
    Process(output, "trainer", *run.trainer("--replay", str(recording)), warm=True).finish(DEADLINE_S)
    checkpoint = run.path / "checkpoints" / f"step-{run.max_steps:08d}"
    weights = run.path / "weights" / f"v{run.max_steps:08d}"
    return sha256(weights.glob("*.safetensors")), tensors_sha256(checkpoint.glob("*.safetensors"))


def test_recorded_batches_of_a_killed_run_replay_to_the_same_bits(campaign: Campaign, reference: Reference) -> None:
    campaign.run = replace(campaign.run, record_batches=True, max_steps=9)
    result, _ = campaign.with_kills(dict.fromkeys(SIGNS, (Aim(0.3, FIRST_ACT),)))
    expected = reference.after(9)
    assert result == expected
    outbox = campaign.run.folder / "killed-1" / "outbox"
    again = replay(campaign.run.named("replayed"), outbox)
    assert again == (expected.weights, expected.state)

    train_twice(outbox, step=5)
    other = replay(campaign.run.named("doubled"), outbox)
    assert other[0] != expected.weights, "a step that is trained twice must show in the weights"


def train_twice(outbox: Path, step: int) -> None:
    """Put the samples of the batch before in the place of batch `step`."""
    before = BatchFile(batch_path(outbox / "retired", step - 1))
    rows = range(len(before.manifest.columns.num_bytes.numpy()))
    samples = decode_rows(before.manifest, rows, before.frames(rows))
    batch = build_batch(before.manifest.run_id, step, samples)
    write_durably(batch_path(outbox / "retired", step), file_chunks(batch))


@pytest.mark.parametrize(
    "aims",
    [pytest.param((), id="undisturbed"), pytest.param((Aim(0.5, FIRST_ACT), Aim(0.2, FIRST_ACT)), id="killed")],
)
def test_repeated_and_reordered_messages_train_no_step_twice_or_out_of_order(
    campaign: Campaign, reference: Reference, aims: tuple[Aim, ...]
) -> None:
    with ChaosProxy(campaign.run.port, faults=Faults(duplicate=0.3, swap=0.1, replay=0.1)) as proxy:
        campaign.run = replace(campaign.run, trainer_port=proxy.port, max_steps=12)
        result, _ = campaign.with_kills(dict.fromkeys(SIGNS, aims))
    assert result == reference.after(12)
    assert all(proxy.num_faults[fault] for fault in ("duplicate", "swap", "replay"))
