from hypothesis import given
from hypothesis import strategies as st

from transport.outbox.progress import PublishedWeights, ReportedProgress

START = ReportedProgress(run_id="r")
EVENTS = st.lists(st.tuples(st.sampled_from(["trained", "committed"]), st.integers(1, 20)))


def weights(version: int, digest: str = "d") -> PublishedWeights:
    return PublishedWeights(version=version, location=f"/w/{version}", digest=digest)


def apply(progress: ReportedProgress, event: tuple[str, int]) -> ReportedProgress:
    kind, step = event
    return progress.with_trained(step) if kind == "trained" else progress.with_committed(step)


@given(EVENTS)
def test_progress_never_goes_back_and_keeps_its_order(events: list[tuple[str, int]]) -> None:
    progress = START
    for event in events:
        after = apply(progress, event)
        assert after.last_trained >= progress.last_trained
        assert after.last_committed >= progress.last_committed
        assert after.last_retired <= after.last_committed <= after.last_trained
        assert apply(after, event) == after
        progress = after


def test_batches_of_the_newest_checkpoint_are_not_retired() -> None:
    progress = START.with_committed(10)
    assert progress.last_retired == 0
    assert progress.with_committed(20).last_retired == 10
    assert progress.with_committed(20).with_committed(20).last_retired == 10


@given(EVENTS, st.integers(0, 20))
def test_a_fallback_keeps_the_order_and_everything_that_is_not_retired(
    events: list[tuple[str, int]], step: int
) -> None:
    progress = START
    for event in events:
        progress = apply(progress, event)
    after = progress.with_fallback(step)
    assert after.last_retired <= after.last_committed <= progress.last_committed
    assert (after.last_retired, after.last_trained) == (progress.last_retired, progress.last_trained)
    assert after.with_fallback(step) == after


def test_a_checkpoint_that_was_fallen_back_to_keeps_its_batches_until_the_next_but_one() -> None:
    """12 was no good: after the next commit, 10 is still the checkpoint before the newest."""
    progress = START.with_committed(10).with_committed(12).with_fallback(10)
    assert progress.last_committed == 10
    assert progress.with_committed(20).last_retired == 10
    assert progress.with_committed(20).with_committed(30).last_retired == 20


def test_older_weights_are_ignored_and_newer_ones_replace() -> None:
    progress = START.with_weights(weights(3))
    assert progress.with_weights(weights(2)) == progress
    assert progress.with_weights(weights(4)).weights == weights(4)


def test_same_version_with_another_digest_replaces() -> None:
    assert START.with_weights(weights(3)).with_weights(weights(3, "other")).weights == weights(3, "other")


def test_newest_version_at_another_place_replaces_it() -> None:
    """A trainer that serves weights from memory comes back under another address."""
    old = PublishedWeights(version=4, location="zmq:tcp://a:1", digest="d")
    new = PublishedWeights(version=4, location="zmq:tcp://a:2", digest="d")
    assert ReportedProgress(run_id="r").with_weights(old).with_weights(new).weights == new
