"""The row of a kind of state, and the rules by which the entries of several relays become one.

| rule | what counts |
|---|---|
| *final* | the entries of all relays together, in any order, as revocations |
| *ordered* | the last entry of each key, in the order of the stream, as names |
| *endorsed* | an entry that a trusted root has signed, as the keys of tokens |
| *issued* | what the holder of the CA's key has in its own file; it adds only what decides nothing |
| *local* | nothing is shared |

A rule is code once, for every kind that has it. What an entry says is known to the functions of its row. Must
not read the table of kinds, and must not know what carries entries from relay to relay.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.state.ledger import Entry, Ledger, LedgerState
from schemas.times import SystemClock

AT_ONCE = 256
"""How many entries of one kind are shared before the others have their turn."""
MAX_REFUSED = 64
"""How many entries that no root endorses are kept, to be judged again by another root."""
OLDEST = "0.2"
"""The version that a relay is taken for which does not say its own; those before cannot be in its fleet."""
SINCE_SEALED = "0.3"
"""From which version on relays seal: in a fleet that is sealed none is older, whatever it says."""
SIGNED = "signed"
"""The member, true, of an entry that a relay has signed, where its form notes that; not of its document."""
State = Any
"""What the entries of a file add up to: its row in ``relay.state.kinds`` has the class."""


class Rule(StrEnum):
    """How the entries of several relays are merged."""

    FINAL = "final"
    ORDERED = "ordered"
    ENDORSED = "endorsed"
    ISSUED = "issued"
    LOCAL = "local"


class LazyEntries(Mapping[str, Entry]):
    """Entries by key, each made as it is read: of hundreds of thousands few are lacking elsewhere."""

    def __init__(self, keys: Iterable[str], make: Callable[[str], Entry]) -> None:
        self._keys = keys
        self._make = make

    def __getitem__(self, key: str) -> Entry:
        return self._make(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return sum(1 for _ in self._keys)


@dataclass(frozen=True, slots=True)
class SharedForm:
    """How the entries of a kind are shared: their document is ``cluster.<kind>@1.0.0``.

    Attributes:
        key_of: the key of an entry, of letters, digits, ``-`` and ``_``: of two with one key the later one
            counts. Raises ValueError for what fits the document and is no entry all the same.
        entries: those that the file has, by key.
        has: whether an entry adds nothing to the file.
        line: the line that records an entry, at a time in ms.
        end_ms_of: when an entry says nothing more, in ms since 1970; None if it always does.
        holder_takes: of an *issued* kind, whether the holder of the CA's key takes entries, or all others do.
        unshared: of an *ordered* kind, what was decided here and is not in the stream yet, by key.
        displaced: of an *ordered* kind, the entries that make room for another in this file.
        notes_signed: whether an entry that a relay has signed has the member ``signed``.
    """

    key_of: Callable[[Entry], str]
    entries: Callable[[State], Mapping[str, Entry]]
    has: Callable[[State, Entry], bool]
    line: Callable[[State, Entry, int], Entry]
    end_ms_of: Callable[[Entry], int | None] = lambda _entry: None
    holder_takes: bool = False
    unshared: Callable[[State], Mapping[str, Entry]] = lambda _state: {}
    displaced: Callable[[State, Entry], Iterable[Entry]] = lambda _state, _entry: ()
    displaced_event: str = "entry displaced by that of another node"
    notes_signed: bool = False


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file of JSON lines.

    Attributes:
        name: names it in the log, and to the operator.
        path: below the state directory.
        holds: what it is for, in a few words.
        empty: makes the state of no entries.
        watched: whether a running relay looks for changes of it.
        applied: whether these take effect by themselves; what uses the file reads it for each use otherwise.
        copied: whether another relay of the fleet starts with a copy.
        secret: the members of its entries that are shown to no one.
        lasting: the entries of a state that must stay in the file; None: no line ever leaves it.
    """

    name: str
    path: str
    holds: str
    empty: Callable[[], LedgerState]
    watched: bool = True
    applied: bool = True
    copied: bool = False
    secret: frozenset[str] = frozenset()
    lasting: Callable[[State], Sequence[Entry]] | None = None

    def in_directory(self, root: Path) -> Path:
        return root / self.path

    def ledger(self, root: Path) -> Ledger[Any]:
        """Return what reads and appends to it below ``root``."""
        path, is_secret = self.in_directory(root), bool(self.secret)
        return Ledger(path, self.empty(), secret=is_secret, lasting=self.lasting)


def is_older(version: str, since: str) -> bool:
    """Return whether a relay of ``version`` does not know what relays know from ``since`` on."""
    return _minor(version) < _minor(since)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


@dataclass(frozen=True, slots=True)
class StateKind:
    """Entries that are merged by one rule; several kinds may be in one file.

    Attributes:
        form: how they are shared; None if they are *local*.
        since: the version from which relays know it: with an older one in the fleet it is not shared.
        actions: what the member ``action`` of its lines may be; none if all lines of the file are of it.
    """

    name: str
    file: StateFile
    rule: Rule
    form: SharedForm | None = None
    since: str = OLDEST
    actions: tuple[str, ...] = ()

    def entries_in(self, lines: Iterable[Entry]) -> Iterator[Entry]:
        """Yield the entries of this kind among ``lines``, without members that are secret."""
        for line in lines:
            if not self.actions or line.get("action") in self.actions:
                yield {name: value for name, value in line.items() if name not in self.file.secret}


@define(frozen=True, eq=False)
class Merging:
    """What the rules ask of the relay.

    Attributes:
        now_ms: the system's clock.
        issues: whether the CA's key is here.
        is_endorsed: for each kind that is *endorsed*, whether a trusted root has signed an entry.
        refused: called for each entry that none has signed, with its kind.
    """

    now_ms: SystemClock
    log: FilteringBoundLogger
    issues: bool = False
    is_endorsed: Mapping[str, Callable[[Entry], bool]] = field(factory=dict)
    refused: Callable[[str], None] = lambda _kind: None


@define(eq=False, repr=False)
class SharedLedger:
    """The entries of one kind in a file of this relay's, as all relays have them in common."""

    row: StateKind
    _ledger: Ledger[Any]
    _merging: Merging
    _refused: dict[str, Entry] = field(init=False, factory=dict)
    kind: str = field(init=False)
    form: SharedForm = field(init=False)

    def __attrs_post_init__(self) -> None:
        if self.row.form is None:
            raise ValueError(f"{self.row.name} is not shared")
        self.kind, self.form = self.row.name, self.row.form
        if self.row.rule is Rule.ENDORSED and self.kind not in self._merging.is_endorsed:
            raise ValueError(f"nothing says which entries of {self.kind} are endorsed")

    @property
    def ordered(self) -> bool:
        """Whether an entry is valid only after those before it. Others commute."""
        return self.row.rule is Rule.ORDERED

    def settle(self, arrived: Mapping[str, Entry], known: Container[str]) -> Mapping[str, Entry]:
        """Add to the file what has ``arrived`` and is not in it, by key.

        Return the entries of the file that have not ended and that the other relays lack, at most
        ``AT_ONCE``: it is called again for the rest. ``known`` has the keys of those that they have, and may
        get more meanwhile. Runs on a thread.

        Raises:
            StateError, OSError: the file cannot be used. What has arrived is given again.
        """
        match self.row.rule:
            case Rule.ORDERED:
                return self._settle_ordered(arrived, known)
            case Rule.ENDORSED:
                self._take_endorsed(arrived)
            case Rule.ISSUED:
                if self.form.holder_takes is self._merging.issues:
                    self._take(arrived)
                if not self._merging.issues:
                    return {}
            case _:
                self._take(arrived)
        return self._missing(known)

    def _take_endorsed(self, arrived: Mapping[str, Entry]) -> None:
        state, is_endorsed = self._ledger.read(), self._merging.is_endorsed[self.kind]
        waiting = {
            key: entry
            for key, entry in (self._refused | dict(arrived)).items()
            if not self.form.has(state, entry)
        }
        endorsed = {key: entry for key, entry in waiting.items() if is_endorsed(entry)}
        self._take(endorsed)
        for key in endorsed:
            self._refused.pop(key, None)
        for key in arrived.keys() & waiting.keys() - endorsed.keys():
            self._refuse(key, arrived[key])

    def _refuse(self, key: str, entry: Entry) -> None:
        self._merging.refused(self.kind)
        if key not in self._refused:
            if len(self._refused) >= MAX_REFUSED:
                return
            event = f"{self.kind.replace('_', ' ')} refused: no root endorses it"
            self._merging.log.error(event, **{self.kind: key})
        self._refused[key] = entry

    def _settle_ordered(self, arrived: Mapping[str, Entry], known: Container[str]) -> Mapping[str, Entry]:
        if arrived:
            with self._ledger.locked() as state:
                if lines := self._in_order(state.copy(), arrived):
                    self._ledger.append(*lines)
        state = self._ledger.read()
        decided = self.form.entries(state)
        missing = {key: decided[key] for key in decided if key not in known} | dict(self.form.unshared(state))
        return dict(islice(missing.items(), AT_ONCE))

    def _in_order(self, draft: State, arrived: Mapping[str, Entry]) -> list[Entry]:
        """Return the lines to be written; ``draft`` is the state before, and then the one that follows."""
        form, lines = self.form, list[Entry]()

        def write(entry: Entry, *, shared: bool) -> None:
            lines.append(
                form.line(draft, entry, self._merging.now_ms()) | ({"shared": True} if shared else {})
            )
            draft.apply(lines[-1])

        for key, entry in arrived.items():
            decided_here = form.unshared(draft).get(key)
            if decided_here is not None:
                # What was decided here and is on its way to the others comes later; or it has come back.
                if decided_here == {name: value for name, value in entry.items() if name != SIGNED}:
                    write(entry, shared=True)
            elif not form.has(draft, entry):
                for changed in form.displaced(draft, entry):
                    holder = form.key_of(changed)
                    self._merging.log.warning(form.displaced_event, node_id=holder, other=key)
                    write(changed, shared=holder not in form.unshared(draft))
                write(entry, shared=True)
        return lines

    def _take(self, arrived: Mapping[str, Entry]) -> None:
        """Record what is not in the file."""
        if not self._new(self._ledger.read(), arrived):
            return
        with self._ledger.locked() as state:
            # Another process may have recorded some of it meanwhile.
            self._ledger.append(*self._new(state, arrived))

    def _new(self, state: State, arrived: Mapping[str, Entry]) -> list[Entry]:
        now, form = self._merging.now_ms(), self.form
        lines = (form.line(state, entry, now) for entry in arrived.values() if not form.has(state, entry))
        return sorted(lines, key=lambda line: int(line.get("ts_ms", 0)))

    def _missing(self, known: Container[str]) -> Mapping[str, Entry]:
        entries = self.form.entries(self._ledger.read())
        lacking = ((key, entries[key]) for key in entries if key not in known)
        return dict(islice(((key, entry) for key, entry in lacking if self._lasts(entry)), AT_ONCE))

    def _lasts(self, entry: Entry) -> bool:
        end_ms = self.form.end_ms_of(entry)
        return end_ms is None or end_ms > self._merging.now_ms()
