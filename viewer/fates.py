"""What became of every rollout, from the ledger: the same sums as `orchestrator ledger`, which also checks them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from transport.wire.ledger import Record, tally
from viewer.json_lines import read_spans

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def count_fates(path: Path) -> dict[str, int]:
    """Rollouts by fate (`trained`, `filtered:...`, `failed:...`, `cancelled`, `in_flight`); empty without a ledger."""
    counts: Counter[str] = Counter()
    for state, count in tally(_records(path)).states.items():
        counts[state.partition("@")[0]] += count
    return dict(counts.most_common())


def _records(path: Path) -> Iterator[Record]:
    with suppress(OSError):
        for _, line in read_spans(path):
            with suppress(msgspec.MsgspecError):  # torn by a kill, or of a newer version
                yield _decoder.decode(line)
