"""Labels that relays give at once end the same everywhere, in any order of steps and restarts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from relay.state.ledger import Entry
from relay.state.names import LabelTakenError, NameLedger
from tests.fakes.clock import FakeClock
from tests.fakes.examples import examples
from tests.fakes.shared import shared
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT

RELAYS = 3
NODES = (NODE_ID, OTHER_NODE_ID, NODE_ID[:-1] + "1")
LABELS = ("", "pump", "Pump", "a fan")


@dataclass
class Stream:
    """The last entry of each key with its sequence number, as the servers keep them."""

    entries: dict[str, tuple[int, Entry]] = field(default_factory=dict)
    last: int = 0

    def append(self, key: str, entry: Entry, expected: int) -> int | None:
        if expected != self.last:
            return None
        self.last += 1
        self.entries[key] = (self.last, entry)
        return self.last

    def after(self, sequence: int) -> list[tuple[int, str, Entry]]:
        return sorted(
            (number, key, entry) for key, (number, entry) in self.entries.items() if number > sequence
        )


class Relay:
    """A relay as ``relay.state.sharer`` runs it, step by step."""

    def __init__(self, file: Path, stream: Stream) -> None:
        self.ledger = NameLedger(file, FakeClock(NOW_MS))
        self.shared = shared("name", self.ledger.ledger)
        self.stream = stream
        self.restart()

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
            appended = self.stream.append(key, entry, newest)
            if appended is None:
                return
            newest = appended
            self.shared.settle({key: entry}, frozenset(self.known))

    @property
    def labels(self) -> dict[str, str]:
        named = self.ledger.read().by_node.items()
        return {node_id: name.label for node_id, name in named if name.label}


relays = st.integers(0, RELAYS - 1)
steps = st.one_of(
    st.tuples(st.just("label"), relays, st.sampled_from(NODES), st.sampled_from(LABELS)),
    st.tuples(st.just("forget"), relays, st.sampled_from(NODES), st.just("")),
    st.tuples(st.just("read"), relays, st.integers(1, 4), st.just("")),
    st.tuples(st.just("settle"), relays, st.integers(0, 3), st.just("")),
    st.tuples(st.just("restart"), relays, st.just(0), st.just("")),
)


def made(relay: Relay, step: tuple[str, int, str | int, str]) -> None:
    match step:
        case "label", _, str(node_id), label:
            try:
                relay.ledger.label(node_id, TENANT, label)
            except LabelTakenError:
                return
        case "forget", _, str(node_id), _:
            relay.ledger.forget(node_id)
        case "read", _, int(count), _:
            relay.read(count)
        case "settle", _, int(appends), _:
            relay.settle(appends)
        case _:
            relay.restart()


@examples(20, thorough=600)
@given(st.lists(steps, max_size=30))
def test_every_order_of_steps_ends_in_the_same_names_with_each_label_once(
    taken: Sequence[tuple[str, int, str | int, str]],
) -> None:
    with TemporaryDirectory() as directory:
        stream = Stream()
        all_of_them = [Relay(Path(directory) / f"{number}.jsonl", stream) for number in range(RELAYS)]
        for step in taken:
            made(all_of_them[step[1]], step)
        for _ in range(4 * len(NODES)):
            for relay in all_of_them:
                relay.read(len(NODES))
                relay.settle(len(NODES))
        one, *others = all_of_them
        for other in others:
            assert other.ledger.read().by_node == one.ledger.read().by_node
            assert other.ledger.read().forgotten == one.ledger.read().forgotten
        folded = [label.lower() for label in one.labels.values()]
        assert len(set(folded)) == len(folded)
        assert not any(relay.ledger.read().unshared for relay in all_of_them)
