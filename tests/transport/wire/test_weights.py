"""Weight manifests, offers of a transfer, and locations: sound, or refused by name."""

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.weights.weight_ranks import make_offer
from transport.errors import WeightsError
from transport.wire.weights import (
    MANIFEST_NAME,
    Channel,
    ShardEntry,
    TensorEntry,
    WeightManifest,
    WeightOffer,
    WeightRange,
    check_offer,
    hash_bytes,
    location_of,
    parse_location,
    read_weight_manifest,
    version_dir,
    weights_digest,
)

Row = tuple[str, str, tuple[int, ...], str]
ROWS = st.lists(
    st.tuples(st.text(max_size=8), st.sampled_from(["float32", "bfloat16"]), st.tuples(st.integers(1, 9)), st.text()),
    unique_by=lambda row: row[0],
    max_size=6,
)


def manifest(**changes: object) -> WeightManifest:
    entries = (
        TensorEntry(name="a.weight", dtype="float32", shape=(2, 3), shard="model-1.safetensors", hash=hash_bytes(b"a")),
        TensorEntry(name="b.weight", dtype="bfloat16", shape=(4,), shard="model-1.safetensors", hash=hash_bytes(b"b")),
    )
    sound = WeightManifest(
        run_id="r",
        version=3,
        tensors=entries,
        shards=(ShardEntry(file="model-1.safetensors", num_bytes=40),),
        digest=weights_digest((entry.name, entry.dtype, entry.shape, entry.hash) for entry in entries),
    )
    return msgspec.structs.replace(sound, **changes)


def written(folder: Path, value: object) -> Path:
    path = folder / MANIFEST_NAME
    path.write_bytes(msgspec.json.encode(value))
    return path


@given(ROWS, st.randoms())
def test_digest_does_not_depend_on_the_order_of_tensors(rows: list[Row], order: random.Random) -> None:
    shuffled = list(rows)
    order.shuffle(shuffled)
    assert weights_digest(rows) == weights_digest(shuffled)


@pytest.mark.parametrize(
    "other",
    [
        ("b", "float32", (2, 3), "h"),
        ("a", "bfloat16", (2, 3), "h"),
        ("a", "float32", (3, 2), "h"),
        ("a", "float32", (2, 3), "i"),
    ],
)
def test_digest_depends_on_name_dtype_shape_and_bytes(other: Row) -> None:
    assert weights_digest([("a", "float32", (2, 3), "h")]) != weights_digest([other])


def test_sound_manifest_reads_back(tmp_path: Path) -> None:
    assert read_weight_manifest(written(tmp_path, manifest())) == manifest()


def test_missing_manifest_means_an_incomplete_publish(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="incomplete"):
        read_weight_manifest(tmp_path / MANIFEST_NAME)


def test_manifest_whose_tensors_do_not_have_its_digest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="inconsistent"):
        read_weight_manifest(written(tmp_path, manifest(digest="0" * 32)))


@pytest.mark.parametrize("size", [0, 1, 40, -1])
def test_torn_manifest_is_refused_with_its_path(tmp_path: Path, size: int) -> None:
    path = written(tmp_path, manifest())
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(WeightsError, match=str(path)):
        read_weight_manifest(path)


def test_manifest_of_an_older_version_is_refused_with_what_happens_next(tmp_path: Path) -> None:
    path = written(tmp_path, manifest())
    path.write_text(path.read_text().replace('"num_bytes":40', '"num_bytes":40,"hash":"ef"'))
    with pytest.raises(
        WeightsError, match=r"unknown field `hash`.*the trainer publishes again when it starts"
    ) as raised:
        read_weight_manifest(path)
    assert str(path) in str(raised.value)


def test_deeply_nested_manifest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / MANIFEST_NAME
    path.write_text('{"tensors":' + "[" * 100_000)
    with pytest.raises(WeightsError, match="does not decode"):
        read_weight_manifest(path)


def test_versions_sort_by_name(tmp_path: Path) -> None:
    names = [version_dir(tmp_path, version).name for version in (2, 10, 100)]
    assert names == sorted(names)
    assert names[0] == "v00000002"


def changed(offer: WeightOffer, **changes: object) -> WeightOffer:
    return msgspec.structs.replace(offer, **changes)


@pytest.mark.parametrize(
    ("ranges", "reason"),
    [
        ((), "do not cover"),
        ((WeightRange("a", 0, 8, 0),), "do not cover"),
        ((WeightRange("a", 0, 8, 0), WeightRange("a", 4, 8, 0)), "do not cover"),
        ((WeightRange("a", 0, 12, 0), WeightRange("a", 0, 12, 0)), "do not cover"),
        ((WeightRange("a", 0, 12, 0), WeightRange("x", 0, 4, 0)), "do not cover"),
        ((WeightRange("a", 0, 16, 0),), "do not cover"),
        ((WeightRange("a", 0, 12, 1),), "no server holds"),
        ((WeightRange("a", 0, 12, -1),), "no server holds"),
        ((WeightRange("a", 0, 12, 0), WeightRange("a", 12, 0, 0)), "no server holds"),
    ],
)
def test_offer_whose_ranges_are_not_the_tensors_is_refused(ranges: tuple[WeightRange, ...], reason: str) -> None:
    offer, _ = make_offer({"a": np.zeros(3, np.float32)}, 1, ("tcp://h:1",))
    check_offer(offer, "h", version=1, run_id="default", max_bytes=12)
    with pytest.raises(WeightsError, match=reason):
        check_offer(changed(offer, ranges=ranges), "h", version=1, run_id="default", max_bytes=12)


def test_offer_of_something_else_or_too_much_is_refused() -> None:
    offer, _ = make_offer({"a": np.zeros(3, np.float32)}, 1, ("tcp://h:1",))
    for version, run_id, max_bytes in ((2, "default", 12), (1, "other", 12), (1, "default", 11)):
        with pytest.raises(WeightsError):
            check_offer(offer, "h", version=version, run_id=run_id, max_bytes=max_bytes)
    forged = changed(offer, manifest=changed(offer.manifest, digest="0"))  # type: ignore[arg-type]
    with pytest.raises(WeightsError, match="inconsistent"):
        check_offer(forged, "h", version=1, run_id="default", max_bytes=12)


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("/a/b:c/manifest.json", (Channel.FILESYSTEM, "/a/b:c/manifest.json")),
        ("zmq:tcp://h:1", (Channel.ZMQ, "tcp://h:1")),
    ],
)
def test_location_names_channel_and_address(location: str, expected: tuple[Channel, str]) -> None:
    assert parse_location(location) == expected
    assert location_of(*expected) == location
