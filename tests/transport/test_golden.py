"""The bytes of SCHEMA_VERSION 2 are what they were. If a test here fails, bump the version: do not touch the files."""

import typing
from pathlib import Path

import msgspec
import pytest

from tests.golden import schema_2
from transport.answers import answer_hello
from transport.batch import decode_batch
from transport.batch_file import BatchFile
from transport.codec import decode_client_message, decode_server_message
from transport.errors import CodecError, OutboxError, SchemaMismatch
from transport.limits import Limits
from transport.manifest import SCHEMA_VERSION
from transport.messages import ClientMessage, Hello, Refusal, ServerMessage
from transport.outbox import Outbox

SCHEMA_1 = Path(schema_2.__file__).parent / "schema_1"
"""A greeting and a batch file of version 1, whose types are gone."""
MESSAGES = schema_2.messages()


def tags(union: object) -> set[str]:
    return {str(kind.__struct_config__.tag) for kind in typing.get_args(union)}


def test_every_message_has_golden_bytes() -> None:
    assert set(MESSAGES) == tags(ClientMessage) | tags(ServerMessage)
    assert {path.name for path in schema_2.FOLDER.iterdir()} == set(schema_2.files())


def test_golden_bytes_are_of_the_current_version() -> None:
    assert SCHEMA_VERSION == 2, "keep schema_2 as it is, and add golden bytes of the new version beside it"


@pytest.mark.parametrize("name", schema_2.files())
def test_encoding_still_gives_the_golden_bytes(name: str) -> None:
    assert schema_2.files()[name] == (schema_2.FOLDER / name).read_bytes()


@pytest.mark.parametrize("name", MESSAGES)
def test_golden_message_still_decodes(name: str) -> None:
    decode = decode_client_message if name in tags(ClientMessage) else decode_server_message
    assert decode((schema_2.FOLDER / f"{name}.msgpack").read_bytes()) == MESSAGES[name]


@pytest.mark.parametrize("name", MESSAGES)
def test_golden_message_of_one_side_is_refused_by_the_other(name: str) -> None:
    decode = decode_server_message if name in tags(ClientMessage) else decode_client_message
    with pytest.raises(CodecError):
        decode((schema_2.FOLDER / f"{name}.msgpack").read_bytes())


def test_golden_batch_still_decodes() -> None:
    recorded = BatchFile(schema_2.FOLDER / schema_2.BATCH_NAME).batch()
    assert recorded.manifest == schema_2.batch().manifest
    plain, full = decode_batch(recorded)
    assert plain == schema_2.plain_sample()
    assert full == schema_2.full_sample()
    assert full.mm_kwargs["pixel_values"].numpy().tolist() == [[0x0100, 0x0302], [0x0504, 0x0706]]


def test_every_optional_field_of_a_sample_is_in_the_golden_batch() -> None:
    full, plain = schema_2.full_sample(), schema_2.plain_sample()
    for field in msgspec.structs.fields(full):
        if not field.required:
            assert getattr(full, field.name) != getattr(plain, field.name), field.name


def test_greeting_of_version_1_is_refused_by_name(tmp_path: Path) -> None:
    hello = decode_client_message((SCHEMA_1 / "hello.msgpack").read_bytes())
    assert isinstance(hello, Hello)
    reply = answer_hello(Outbox(tmp_path, "golden"), Limits(), hello)
    assert reply == Refusal(seq=1, schema_version=2, reason="schema version 1, this server speaks 2")


def test_batch_of_version_1_is_refused_by_name() -> None:
    with pytest.raises((SchemaMismatch, OutboxError), match="this side speaks 2, the peer 1"):
        BatchFile(SCHEMA_1 / "batch.batch").batch()
