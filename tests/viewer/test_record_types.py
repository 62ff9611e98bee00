"""The fields that the viewer reads are those that the services write."""

from trainer.observe.token_export import TokenRecord
from viewer.answers.sequences import FLAGS, GIVEN, NAMES, NUMBERS, PLACE
from viewer.index.records import TokenHead


def test_token_records_have_every_field_that_is_read() -> None:
    written = set(TokenRecord.__struct_fields__)
    assert set(TokenHead.__struct_fields__) <= written
    assert {*PLACE, *NAMES, *GIVEN, *NUMBERS, *FLAGS} <= written
