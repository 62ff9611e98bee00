"""The fields that the viewer reads are those that the services write."""

import pytest

from orchestrator.ledger_records import Cancelled, Dispatched, Retried, Settled
from trainer.token_record import TokenRecord
from viewer.fates import _Line
from viewer.records import TokenHead
from viewer.sequences import FLAGS, GIVEN, NAMES, NUMBERS, PLACE


def test_token_records_have_every_field_that_is_read() -> None:
    written = set(TokenRecord.__struct_fields__)
    assert set(TokenHead.__struct_fields__) <= written
    assert {*PLACE, *NAMES, *GIVEN, *NUMBERS, *FLAGS} <= written


@pytest.mark.parametrize("record", [Dispatched, Settled, Retried, Cancelled])
def test_ledger_lines_have_every_field_that_is_read(record: type) -> None:
    known = {*_Line.__struct_fields__, "group", "index", "reason"}
    assert set(record.__struct_fields__) <= known
