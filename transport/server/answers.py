"""What the server answers, as functions of the outbox and the message: no sockets, no clocks.

Every answer is the same when the question is repeated, so a client may ask again after any fault.
"""

from transport.errors import OutboxError, TransportError
from transport.outbox.outbox import Outbox
from transport.outbox.progress import PublishedWeights
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import (
    Committed,
    EndOfRun,
    Failure,
    GetManifest,
    GetSamples,
    Hello,
    Limits,
    Manifest,
    Refusal,
    Samples,
    ServerMessage,
    Trained,
    WeightsPublished,
    Welcome,
)

_MAX_RUN_ID_CHARS = 100
"""Of a foreign run's id, what is repeated."""

Reply = tuple[ServerMessage, list[memoryview]]
TrainerReport = Trained | Committed | WeightsPublished


def foreign(run_id: str, hello: Hello) -> str | None:
    """Why a server of `run_id` cannot serve this client at all: another schema version, another run."""
    if hello.schema_version != SCHEMA_VERSION:
        return f"schema version {hello.schema_version}, this server speaks {SCHEMA_VERSION}"
    if hello.run_id != run_id:
        return f"run {hello.run_id[:_MAX_RUN_ID_CHARS]!r}, this server runs {run_id!r}"
    return None


def refusal(outbox: Outbox, limits: Limits, hello: Hello) -> str | None:
    """Why this client is not served, or None. Names both sides of whatever does not match."""
    retired, newest = outbox.progress.last_retired, outbox.next_step - 1
    if (mismatch := foreign(outbox.run_id, hello)) is not None:
        return mismatch
    if not 0 <= hello.rank < hello.world_size <= limits.max_peers:
        return f"rank {hello.rank} of {hello.world_size}, this server takes up to {limits.max_peers} ranks"
    if hello.last_committed < retired:
        return (
            f"it resumes after step {hello.last_committed}, but batches up to {retired} were committed and retired: "
            f"restore its checkpoint of step {retired} or a later one"
        )
    if hello.last_committed > newest:
        return (
            f"its checkpoint contains step {hello.last_committed}, but the newest batch of this run is {newest}: they "
            "are of different run directories, or the outbox was restored from an older copy"
        )
    return None


def answer_hello(outbox: Outbox, limits: Limits, hello: Hello) -> Welcome | Refusal:
    """`Welcome`, or `Refusal` with the reason."""
    reason = refusal(outbox, limits, hello)
    if reason is not None:
        return Refusal(seq=hello.seq, schema_version=SCHEMA_VERSION, reason=reason)
    return Welcome(seq=hello.seq, schema_version=SCHEMA_VERSION)


def has_lost_commit(outbox: Outbox, hello: Hello) -> bool:
    """Whether a welcome client's checkpoint is newer than we know: its `Committed` was lost on the way."""
    return hello.last_committed > outbox.progress.last_committed


def has_fallen_back(outbox: Outbox, hello: Hello) -> bool:
    """Whether a welcome trainer comes from an older checkpoint than it once reported. Its first rank speaks for all."""
    return hello.rank == 0 and hello.last_committed < outbox.progress.last_committed


def answer_manifest(outbox: Outbox, last_step: int | None, ask: GetManifest) -> ServerMessage | None:
    """The manifest, the end of the run, or why it cannot be; None while the batch is still to be cut."""
    if last_step is not None and ask.step > last_step:
        return EndOfRun(seq=ask.seq)
    if ask.step == outbox.next_step:
        return None
    if ask.step > outbox.next_step:
        return Failure(
            seq=ask.seq, reason=f"batch {ask.step} is ahead of this run: its next batch is {outbox.next_step}"
        )
    try:
        return Manifest(seq=ask.seq, manifest=outbox.manifest(ask.step))
    except OutboxError as error:
        return Failure(seq=ask.seq, reason=str(error))


def answer_samples(outbox: Outbox, limits: Limits, ask: GetSamples) -> Reply:
    """The frames asked for; refused if the reply would be too large, or if the file is damaged, with its path."""
    try:
        ask.indices.check()
        if ask.indices.dtype != "int32" or len(ask.indices.shape) != 1:
            return _failure(ask.seq, f"rows must be an int32 vector, got {ask.indices.dtype}{list(ask.indices.shape)}")
        rows = ask.indices.numpy()
        sizes = outbox.manifest(ask.step).columns.num_bytes.numpy()
        if rows.size and not (rows.min() >= 0 and rows.max() < len(sizes)):
            return _failure(ask.seq, f"batch {ask.step} has rows 0 to {len(sizes) - 1}; others were asked for")
        num_bytes = int(sizes[rows].sum())
        if rows.size > 1 and num_bytes > limits.max_reply_bytes:
            return _failure(ask.seq, f"{num_bytes} bytes in one reply, the limit is {limits.max_reply_bytes}")
        return Samples(seq=ask.seq), outbox.frames(ask.step, rows.tolist())
    except TransportError as error:
        return _failure(ask.seq, str(error))


def record_report(outbox: Outbox, report: TrainerReport) -> None:
    """Make what the trainer reports durable. `OutboxError` if the batch was never cut."""
    match report:
        case Trained(step=step):
            outbox.mark_trained(step)
        case Committed(step=step):
            outbox.retire(step)
        case WeightsPublished(version=version, location=path, digest=digest, canary=canary):
            if canary is not None:
                canary.check()
            outbox.mark_weights(PublishedWeights(version=version, location=path, digest=digest, canary=canary))


def _failure(seq: int, reason: str) -> Reply:
    return Failure(seq=seq, reason=reason), []
