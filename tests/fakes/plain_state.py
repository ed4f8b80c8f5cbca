"""A kind of state that only tests have, by any rule: nodes that are pinned. Its lines are its entries.

A line has the entry's members, and ``ts_ms``; of an *ordered* kind also ``shared``, true where the other
relays have it too.
"""

from functools import partial

from relay.state.ledger import Entry, LedgerState
from relay.state.merging import Rule, SharedForm, StateFile, StateKind

_OF_LINES = {"ts_ms", "shared"}


class PlainEntries(LedgerState):
    """The entries by node: of two of one node the later one counts if they are ``ordered``."""

    def __init__(self, *, ordered: bool) -> None:
        self.ordered = ordered
        self.by_key: dict[str, Entry] = {}
        self.unshared: dict[str, Entry] = {}

    def apply(self, entry: Entry) -> None:
        key, plain = entry["node_id"], {name: entry[name] for name in entry.keys() - _OF_LINES}
        if not isinstance(key, str):
            raise TypeError(key)
        if not self.ordered:
            self.by_key.setdefault(key, plain)
            return
        self.by_key[key] = plain
        if entry.get("shared") is True:
            self.unshared.pop(key, None)
        else:
            self.unshared[key] = plain


def pins_by(rule: Rule, *, copied: bool = True) -> StateKind:
    """Return the row of the kind."""
    file = StateFile(
        "pins",
        "pins.jsonl",
        "the nodes that are pinned",
        partial(PlainEntries, ordered=rule is Rule.ORDERED),
        copied=copied,
        lasting=(lambda state: [*state.by_key.values()]) if rule is Rule.ORDERED else None,
    )
    form = SharedForm(
        key_of=lambda entry: str(entry["node_id"]),
        entries=lambda state: state.by_key,
        has=lambda state, entry: state.by_key.get(entry["node_id"]) == entry,
        line=lambda _state, entry, now_ms: {"ts_ms": now_ms, **entry},
        unshared=lambda state: state.unshared,
    )
    return StateKind("pin", file, rule, form)
