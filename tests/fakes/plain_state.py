"""A kind whose lines are its entries: what a new kind needs beside its row and its document.

A line has the entry's members, and ``ts_ms``; of an *ordered* kind also ``shared``, true where the other
relays have it too. Must not know any kind.
"""

from collections.abc import Mapping
from functools import partial

from relay.state.ledger import Entry
from relay.state.merging import SharedForm

_OF_LINES = {"ts_ms", "shared"}


class PlainEntries:
    """The entries by the member ``key``: of two with one key the later one counts if they are ``ordered``."""

    def __init__(self, key: str, *, ordered: bool = False) -> None:
        self._key = key
        self._ordered = ordered
        self.by_key: dict[str, Entry] = {}
        self.unshared: dict[str, Entry] = {}

    def copy(self) -> "PlainEntries":
        """Return an independent copy."""
        other = PlainEntries(self._key, ordered=self._ordered)
        other.by_key, other.unshared = self.by_key.copy(), self.unshared.copy()
        return other

    def apply(self, entry: Entry) -> None:
        """Apply the next entry, as ``relay.state.ledger.LedgerState`` describes."""
        key, plain = entry[self._key], {name: entry[name] for name in entry.keys() - _OF_LINES}
        if not isinstance(key, str):
            raise TypeError(key)
        if self._ordered:
            self.by_key[key] = plain
            if entry.get("shared") is True:
                self.unshared.pop(key, None)
            else:
                self.unshared[key] = plain
        else:
            self.by_key.setdefault(key, plain)


def plain_form(key: str) -> SharedForm:
    """Return how entries with the key ``key`` are shared, by any rule."""
    return SharedForm(
        key_of=lambda entry: str(entry[key]),
        entries=lambda state: state.by_key,
        has=partial(_has, key),
        line=lambda _state, entry, now_ms: {"ts_ms": now_ms, **entry},
        unshared=_unshared,
    )


def _has(key: str, state: PlainEntries, entry: Entry) -> bool:
    return state.by_key.get(entry[key]) == entry


def _unshared(state: PlainEntries) -> Mapping[str, Entry]:
    return state.unshared
