"""Each rule by which entries of relays are merged, by a model: any order of decisions, readings and restarts.

It runs for every kind of the table that has the rule, and for one that only the tests have.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relay.state.kinds import KINDS, NODE_NAMES
from relay.state.ledger import Entry
from relay.state.merging import AT_ONCE, Merging, Rule, SharedLedger, StateKind
from relay.state.names import LabelTakenError, NameLedger
from schemas.process.logs import make_logger
from tests.fakes.clock import FakeClock
from tests.fakes.examples import examples
from tests.fakes.lines import LogLines
from tests.fakes.plain_state import pins_by
from tests.fakes.signer import NOW_MS, TENANT
from tests.fakes.state_lines import JOIN_ID, LINE, NODES, NUMBERS, token_made

RELAYS = 3
LABELS = ("", "pump", "Pump", "a fan")
BEFORE: Mapping[str, Sequence[Entry]] = {"join_token_use": [token_made()]}


def every_kind_by(rule: Rule) -> pytest.MarkDecorator:
    kinds = [kind for kind in (*KINDS, pins_by(rule)) if kind.rule is rule]
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.name)


@dataclass
class Stream:
    """The last entry of each key with its sequence number, as the servers keep them."""

    entries: dict[str, tuple[int, Entry]] = field(default_factory=dict)
    last: int = 0

    def append(self, key: str, entry: Entry) -> None:
        self.last += 1
        self.entries[key] = (self.last, entry)

    def after(self, sequence: int) -> list[tuple[int, str, Entry]]:
        found = [(number, key, entry) for key, (number, entry) in self.entries.items() if number > sequence]
        return sorted(found, key=lambda each: each[0])


class Relay:
    """A relay as ``relay.state.sharer`` runs it, step by step; no trusted root has signed ``forged``."""

    def __init__(
        self, directory: Path, kind: StateKind, stream: Stream, forged: Sequence[Entry], *, issues: bool
    ) -> None:
        (directory / "ca").mkdir(parents=True, mode=0o700)
        self.kind, self.stream = kind, stream
        self.ledger = kind.file.ledger(directory)
        log = make_logger("relay", LogLines())
        is_endorsed = {kind.name: lambda entry: entry not in forged}
        merging = Merging(FakeClock(NOW_MS), log, issues=issues, is_endorsed=is_endorsed)
        self.shared = SharedLedger(kind, self.ledger, merging)
        self._write(*BEFORE.get(kind.name, ()))
        self.decided: list[Entry] = []
        self.restart()

    def _write(self, *lines: Entry) -> None:
        if lines:
            with self.ledger.locked():
                self.ledger.append(*lines)

    def decide(self, number: int, label: str = "") -> None:
        if self.kind.file is NODE_NAMES:
            names = NameLedger(self.ledger.path, FakeClock(NOW_MS))
            with suppress(LabelTakenError):
                names.forget(NODES[number]) if label == "gone" else names.label(NODES[number], TENANT, label)
        elif self.kind.rule is Rule.ORDERED:
            line = LINE[self.kind.name](number)
            switches = [name for name, value in line.items() if isinstance(value, bool)]
            assert switches, "the line of an ordered kind has nothing that a later one changes"
            self._write(line | dict.fromkeys(switches, label != "gone"))
        elif (line := LINE[self.kind.name](number)) not in self.decided:
            self._write(line)
            self.decided.append(line)

    @property
    def entries(self) -> dict[str, Entry]:
        return dict(self.shared.form.entries(self.ledger.read()))

    def restart(self) -> None:
        self.newest, self.known, self.arrived = 0, set[str](), dict[str, Entry]()
        self.caught_up = False

    def read(self, count: int) -> None:
        for number, key, entry in self.stream.after(self.newest)[:count]:
            self.newest = number
            self.known.add(key)
            self.arrived[key] = entry
        self.caught_up |= self.newest == self.stream.last

    def settle(self, appends: int) -> None:
        """Bring the file up to date with what was read; append at most so many entries of it."""
        if not self.caught_up:
            return
        arrived, self.arrived, newest = self.arrived, {}, self.newest
        missing = self.shared.settle(arrived, frozenset(self.known))
        for key, entry in list(missing.items())[:appends]:
            if newest != self.stream.last if self.shared.ordered else key in self.stream.entries:
                return
            self.stream.append(key, entry)
            newest = self.stream.last
            if self.shared.ordered:
                self.shared.settle({key: entry}, frozenset(self.known))


numbers, relays = st.sampled_from(NUMBERS), st.integers(0, RELAYS - 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("decide"), relays, numbers, st.sampled_from((*LABELS, "gone"))),
        st.tuples(st.just("read"), relays, st.integers(1, 4), st.just("")),
        st.tuples(st.just("settle"), relays, st.integers(0, 3), st.just("")),
        st.tuples(st.just("restart"), relays, st.just(0), st.just("")),
    ),
    max_size=30,
)
Steps = Sequence[tuple[str, int, int, str]]
CHANGED_ELSEWHERE: Steps = [
    ("decide", 0, 0, "pump"),
    ("read", 0, 1, ""),
    ("settle", 0, 1, ""),
    ("read", 1, 1, ""),
    ("settle", 1, 1, ""),
    ("decide", 1, 0, "gone"),
]


@contextmanager
def after(
    taken: Steps, kind: StateKind, *, deciding: int = RELAYS, forged: Sequence[Entry] = ()
) -> Iterator[list[Relay]]:
    """Yield the relays once they have taken the steps, and then read and settled; the last one came late.

    The first ``deciding`` decide; the first has the CA's key. ``forged`` are in the stream from the start.
    """
    with TemporaryDirectory() as directory:
        stream = Stream()
        made = [
            Relay(Path(directory) / str(number), kind, stream, forged, issues=number == 0)
            for number in range(RELAYS + 1)
        ]
        for entry in forged:
            stream.append(made[0].shared.form.key_of(entry), entry)
        for step, relay, number, label in taken:
            match step:
                case "decide" if relay < deciding:
                    made[relay].decide(number, label)
                case "read":
                    made[relay].read(number)
                case "settle":
                    made[relay].settle(number)
                case "restart":
                    made[relay].restart()
        for _ in range(4 * len(NUMBERS)):
            for relay_ in made[:RELAYS]:
                relay_.read(len(NUMBERS) + len(forged))
                relay_.settle(len(NUMBERS))
        made[-1].read(stream.last)
        made[-1].settle(0)
        yield made


def keys_of(kind: StateKind, taken: Steps, deciding: int = RELAYS) -> set[str]:
    """Return the keys of what was decided."""
    with TemporaryDirectory() as directory:
        one = Relay(Path(directory) / "one", kind, Stream(), (), issues=True)
        for step, relay, number, _ in taken:
            if step == "decide" and relay < deciding:
                one.decide(number)
        return {*one.entries}


@every_kind_by(Rule.FINAL)
@examples(10, thorough=200)
@given(taken=steps)
def test_final_is_a_union(kind: StateKind, taken: Steps) -> None:
    with after(taken, kind) as made:
        assert all({*relay.entries} == keys_of(kind, taken) for relay in made)


@every_kind_by(Rule.ORDERED)
@examples(20, thorough=600)
@given(taken=steps)
@example(taken=CHANGED_ELSEWHERE)
def test_ordered_is_the_last_decision_by_the_stream_the_same_at_every_relay(
    kind: StateKind, taken: Steps
) -> None:
    with after(taken, kind) as made:
        one, *others = made
        assert all(other.entries == one.entries for other in others)
        assert not any(one.shared.form.unshared(relay.ledger.read()) for relay in made)
        if kind.file is not NODE_NAMES:
            assert one.entries == {key: entry for key, (_, entry) in one.stream.entries.items()}
        else:  # and what must be unique is
            labels = [entry["label"].lower() for entry in one.entries.values() if entry.get("label")]
            assert len({*labels}) == len(labels)


@every_kind_by(Rule.ORDERED)
def test_of_two_decisions_on_one_key_the_one_that_is_appended_later_counts(
    kind: StateKind, tmp_path: Path
) -> None:
    first: Steps = [("decide", 0, 0, "pump"), ("read", 0, 1, ""), ("settle", 0, 1, "")]
    alone = Relay(tmp_path / "alone", kind, Stream(), (), issues=True)
    alone.decide(0, "gone")
    with after([*first, ("decide", 1, 0, "gone")], kind) as made:
        assert all(relay.entries == alone.entries for relay in made)


@every_kind_by(Rule.ENDORSED)
@examples(10, thorough=200)
@given(taken=steps)
def test_endorsed_is_a_union_without_what_no_trusted_root_has_signed(kind: StateKind, taken: Steps) -> None:
    forged = [{"node_id": "forged"}] if kind.name == "pin" else [LINE[kind.name](0) | {"root": "cd" * 32}]
    with after(taken, kind, forged=forged) as made:
        assert all({*relay.entries} == keys_of(kind, taken) for relay in made)


@every_kind_by(Rule.ISSUED)
@examples(10, thorough=200)
@given(taken=steps)
def test_issued_is_what_the_holder_of_the_cas_key_has_decided(kind: StateKind, taken: Steps) -> None:
    assert kind.form is not None
    forged: list[Entry] = []
    if not kind.form.holder_takes:
        shared = {
            name: value for name, value in LINE[kind.name](0).items() if name not in {"action", "ts_ms"}
        }
        other = {"leaf": {"kid": "ef" * 32, "issued_ms": NOW_MS}, "person": {"person": JOIN_ID[:-1] + "9"}}
        forged = [shared | other[kind.name]] if kind.name in other else [{"node_id": "forged"}]
    with after(taken, kind, deciding=1, forged=forged) as made:
        holder, *others = made
        decided = keys_of(kind, taken, deciding=1)
        assert {*holder.entries} == decided
        taken_over = set() if kind.form.holder_takes else {*holder.stream.entries}
        assert all({*other.entries} == taken_over for other in others)
        assert {*holder.stream.entries} == decided | {holder.shared.form.key_of(entry) for entry in forged}


@every_kind_by(Rule.ISSUED)
def test_without_the_cas_key_nothing_of_the_file_is_shared(kind: StateKind, tmp_path: Path) -> None:
    relay = Relay(tmp_path, kind, Stream(), (), issues=False)
    relay.decide(0)
    relay.read(1)
    relay.settle(1)
    assert relay.entries
    assert not relay.stream.entries


def test_of_many_entries_some_are_shared_at_a_time(tmp_path: Path) -> None:
    kind = pins_by(Rule.FINAL)
    relay = Relay(tmp_path / "one", kind, Stream(), (), issues=True)
    with relay.ledger.locked():
        relay.ledger.append(*({"ts_ms": NOW_MS, "node_id": str(number)} for number in range(AT_ONCE + 1)))
    first = relay.shared.settle({}, frozenset())
    second = relay.shared.settle({}, frozenset(first))
    assert (len(first), len(second)) == (AT_ONCE, 1)
    assert not first.keys() & second.keys()
