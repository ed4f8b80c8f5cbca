"""One label for one node of a tenant, also when two relays have decided at once."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from relay.state.ledger import Entry
from relay.state.names import NameLedger
from schemas.labels import kept_form
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.shared import shared
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT


@dataclass
class Stream:
    """The stream: the last entry of each key, in the order in which they were appended."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def append(self, key: str, entry: Entry) -> None:
        self.entries.pop(key, None)
        self.entries[key] = entry


class Relay:
    """A relay that reads the stream when it is told to."""

    def __init__(self, directory: Path, name: str, stream: Stream) -> None:
        self.ledger = NameLedger(directory / f"{name}.jsonl", FakeClock(NOW_MS))
        self.lines = LogLines()
        self.shared = shared("name", self.ledger.ledger, lines=self.lines)
        self.stream = stream

    def settle(self, *, appends: bool = True) -> dict[str, Entry]:
        """Read all of the stream; append what it lacks."""
        missing = dict(self.shared.settle(dict(self.stream.entries), set(self.stream.entries)))
        if appends:
            for key, entry in missing.items():
                self.stream.append(key, entry)
                self.shared.settle({key: entry}, set(self.stream.entries))
        return missing

    @property
    def labels(self) -> dict[str, str]:
        return {node_id: name.label for node_id, name in self.ledger.read().by_node.items()}


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def one(tmp_path: Path, stream: Stream) -> Relay:
    return Relay(tmp_path, "one", stream)


@pytest.fixture
def other(tmp_path: Path, stream: Stream) -> Relay:
    return Relay(tmp_path, "other", stream)


def settled(*relays: Relay) -> None:
    """Let the relays settle, in turn, until there is nothing to append."""
    for _ in range(10):
        missing = [relay.settle() for relay in relays]
        if not any(missing):
            return
    raise AssertionError(missing)


def test_of_two_nodes_that_are_given_one_label_at_once_the_first_has_it(one: Relay, other: Relay) -> None:
    one.ledger.label(NODE_ID, TENANT, "pump")
    other.ledger.label(OTHER_NODE_ID, TENANT, "PUMP")
    other.ledger.tag(OTHER_NODE_ID, TENANT, ["spare"])
    settled(one, other)
    for relay in (one, other):
        assert relay.labels == {NODE_ID: "pump", OTHER_NODE_ID: ""}
    (line,) = other.lines.entries("label taken: another node has it")
    assert (line["node_id"], line["other"]) == (OTHER_NODE_ID, NODE_ID)


def test_labels_that_are_swapped_are_swapped_everywhere(one: Relay, other: Relay) -> None:
    one.ledger.label(NODE_ID, TENANT, "a pump")
    one.ledger.label(OTHER_NODE_ID, TENANT, "a fan")
    settled(one, other)
    one.ledger.label(NODE_ID, TENANT, "")
    one.ledger.label(OTHER_NODE_ID, TENANT, "a pump")
    one.ledger.label(NODE_ID, TENANT, "a fan")
    settled(one, other)
    assert one.labels == other.labels == {NODE_ID: "a fan", OTHER_NODE_ID: "a pump"}


@pytest.mark.parametrize("labels", [("pump", "pump"), ("Äpfel", "äpfel")])
def test_two_nodes_with_one_label_in_the_stream_do_not_damage_the_file(
    one: Relay, labels: tuple[str, str]
) -> None:
    for node_id, label in zip((NODE_ID, OTHER_NODE_ID), map(kept_form, labels), strict=True):
        one.stream.append(node_id, {"node_id": node_id, "tenant": TENANT, "label": label, "tags": []})
    one.settle(appends=False)
    assert one.labels == {OTHER_NODE_ID: labels[1]}


@pytest.mark.parametrize(
    "changed",
    [{"label": "<b>"}, {"label": "a" * 30}, {"tags": ["a=b=c"]}, {"tags": ["a=1", "a=2"]}],
    ids=["markup", "readable as an id", "no tag", "two of one key"],
)
def test_what_may_be_no_label_or_tag_has_no_key(one: Relay, changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"label|tag"):
        one.shared.form.key_of({"node_id": NODE_ID, "tenant": TENANT, "label": "pump", "tags": []} | changed)


def test_a_label_beyond_ascii_arrives_in_its_letters_by_an_entry_that_older_relays_read(
    one: Relay, other: Relay
) -> None:
    one.ledger.label(NODE_ID, TENANT, "Gewächshaus")
    settled(one, other)
    assert other.labels == {NODE_ID: "Gewächshaus"}
    (entry,) = one.stream.entries.values()
    assert SchemaRegistry().load("cluster.name@1.0.0").is_valid(entry)
    assert one.settle() == other.settle() == {}


def test_labels_that_look_alike_from_two_relays_at_once_damage_no_file(one: Relay, other: Relay) -> None:
    one.ledger.label(NODE_ID, TENANT, "Gewächshaus")
    other.ledger.label(OTHER_NODE_ID, TENANT, "Gewachshaus")
    settled(one, other)
    assert one.labels == other.labels == {NODE_ID: "Gewächshaus", OTHER_NODE_ID: "Gewachshaus"}
