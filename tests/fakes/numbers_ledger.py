"""A ledger of numbers, for a test and for the processes it starts: to import a test takes seconds."""

from collections.abc import Sequence
from pathlib import Path

from relay.state.ledger import Entry, Ledger, LedgerState


class Numbers(LedgerState):
    """A state that keeps its entries, and counts those applied to it and to the states it is a copy of."""

    def __init__(self, entries: Sequence[Entry] = (), taken: list[object] | None = None) -> None:
        self.entries = list(entries)
        self.taken = [] if taken is None else taken

    def copy(self) -> "Numbers":
        return Numbers(self.entries, self.taken)

    def apply(self, entry: Entry) -> None:
        self.taken.append(int(entry.get("n", 0)))
        self.entries.append(entry)


def ledger_in(path: Path, *, secret: bool = False) -> Ledger[Numbers]:
    return Ledger(path, Numbers(), secret=secret)


def line(number: int) -> bytes:
    return b'{"n":%d}\n' % number
