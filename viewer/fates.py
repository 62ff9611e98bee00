"""What became of every rollout, from the ledger: the same sums as `orchestrator ledger`, which also checks them."""

from collections import Counter
from pathlib import Path

import msgspec


class _Line(msgspec.Struct, frozen=True):
    """Any line of the ledger: each kind has some of the fields (`orchestrator/ledger_records.py`)."""

    kind: str
    seq: int = -1
    size: int = 0
    states: tuple[str, ...] = ()
    state: str = ""
    cursor: int = 0
    beyond: tuple[tuple[int, int], ...] = ()

    def cancels(self, seq: int) -> bool:
        """Whether the group at position `seq` was taken back: from `cursor` on, but for the spans that are done."""
        return seq >= self.cursor and not any(start <= seq < end for start, end in self.beyond)


_decoder: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(_Line)


def count_fates(path: Path) -> dict[str, int]:
    """Rollouts by fate (`trained`, `filtered:...`, `failed:...`, `cancelled`, `in_flight`); empty without a ledger."""
    counts: Counter[str] = Counter()
    running: dict[int, int] = {}
    settled: dict[int, tuple[str, ...]] = {}
    for line in _lines(path):
        match line.kind:
            case "dispatched":
                running[line.seq] = line.size
            case "retried":
                counts[line.state] += 1
            case "settled":
                running.pop(line.seq, None)
                settled[line.seq] = line.states
            case "cancelled":
                counts["cancelled"] += sum(running.pop(seq) for seq in [*running] if line.cancels(seq))
                counts["cancelled"] += sum(len(settled.pop(seq)) for seq in [*settled] if line.cancels(seq))
    for states in settled.values():
        counts.update(state.partition("@")[0] for state in states)
    counts["in_flight"] += sum(running.values())
    return {fate: count for fate, count in counts.most_common() if count}


def _lines(path: Path) -> list[_Line]:
    found = []
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    found.append(_decoder.decode(line))
                except msgspec.MsgspecError:  # torn by a kill, or of a newer version
                    continue
    except OSError:
        return []
    return found
