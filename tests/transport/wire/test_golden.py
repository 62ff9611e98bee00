"""The bytes of SCHEMA_VERSION 3 are what they were. If a test here fails, bump the version: do not touch the files."""

import shutil
import typing
from pathlib import Path

import msgspec
import pytest

from tests.golden import schema_3
from transport.errors import CodecError, OutboxError
from transport.outbox.outbox import BatchFile, Outbox, batch_path
from transport.server.request_handler import answer_hello
from transport.wire.codec import decode_batch, decode_client_message, decode_server_message, foreign_greeting
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import ClientMessage, Hello, Limits, Refusal, ServerMessage, Welcome

OLD = (1, 2)
"""Versions whose types are gone. Of each there is at least a greeting and a batch file."""
MESSAGES = schema_3.messages()


def tags(union: object) -> set[str]:
    return {str(kind.__struct_config__.tag) for kind in typing.get_args(union)}


def test_every_message_has_golden_bytes() -> None:
    assert set(MESSAGES) == tags(ClientMessage) | tags(ServerMessage)
    assert {path.name for path in schema_3.FOLDER.iterdir()} == set(schema_3.files())


def test_golden_bytes_are_of_the_current_version() -> None:
    assert SCHEMA_VERSION == 3, "keep schema_3 as it is, and add golden bytes of the new version beside it"


@pytest.mark.parametrize("name", schema_3.files())
def test_encoding_still_gives_the_golden_bytes(name: str) -> None:
    assert schema_3.files()[name] == (schema_3.FOLDER / name).read_bytes()


@pytest.mark.parametrize("name", MESSAGES)
def test_golden_message_still_decodes(name: str) -> None:
    decode = decode_client_message if name in tags(ClientMessage) else decode_server_message
    assert decode((schema_3.FOLDER / f"{name}.msgpack").read_bytes()) == MESSAGES[name]


@pytest.mark.parametrize("name", MESSAGES)
def test_golden_message_of_one_side_is_refused_by_the_other(name: str) -> None:
    decode = decode_server_message if name in tags(ClientMessage) else decode_client_message
    with pytest.raises(CodecError):
        decode((schema_3.FOLDER / f"{name}.msgpack").read_bytes())


def test_golden_batch_still_decodes() -> None:
    recorded = BatchFile(schema_3.FOLDER / schema_3.BATCH_NAME).batch()
    assert recorded.manifest == schema_3.batch().manifest
    plain, full = decode_batch(recorded)
    assert plain == schema_3.plain_sample()
    assert full == schema_3.full_sample()
    assert full.mm_kwargs["pixel_values"].numpy().tolist() == [[0x0100, 0x0302], [0x0504, 0x0706]]


def test_every_optional_field_of_a_sample_is_in_the_golden_batch() -> None:
    full, plain = schema_3.full_sample(), schema_3.plain_sample()
    for field in msgspec.structs.fields(full):
        if not field.required:
            assert getattr(full, field.name) != getattr(plain, field.name), field.name


def old(version: int, name: str) -> Path:
    return schema_3.FOLDER.with_name(f"schema_{version}") / name


@pytest.mark.parametrize("version", OLD)
def test_greeting_of_an_older_version_is_refused_by_name(version: int, tmp_path: Path) -> None:
    hello = decode_client_message(old(version, "hello.msgpack").read_bytes())
    assert isinstance(hello, Hello)
    reply = answer_hello(Outbox(tmp_path, "golden"), Limits(), hello)
    assert reply == Refusal(seq=1, schema_version=3, reason=f"schema version {version}, this server speaks 3")


@pytest.mark.parametrize("name", ["welcome.msgpack", "refusal.msgpack"])
def test_answer_of_an_older_server_tells_its_version(name: str) -> None:
    data = old(2, name).read_bytes()
    try:
        answer = decode_server_message(data)
    except CodecError:
        assert foreign_greeting(data) == (1, 2)
    else:
        assert isinstance(answer, Welcome | Refusal)
        assert answer.schema_version == 2


@pytest.mark.parametrize("version", OLD)
def test_outbox_of_an_older_version_is_refused_by_name(version: int, tmp_path: Path) -> None:
    path = shutil.copy(old(version, "batch.batch"), batch_path(tmp_path, 12))
    expected = f"{path} is a batch of schema version {version}, this tandem-rl has 3: go on with the tandem-rl that"
    with pytest.raises(OutboxError, match=expected):
        Outbox(tmp_path, "golden")
