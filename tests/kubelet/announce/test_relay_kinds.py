"""Which kinds a node announces, by what its relay says that it knows."""

from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import pytest

from kubelet.announce.relay_kinds import RelayKinds, read_relay_kinds
from schemas.files import write_atomic
from schemas.kind_packages import read_shipped
from schemas.kinds import Kind, KindRegistry, rfc_kinds
from schemas.process.logs import make_logger
from schemas.registry import SCHEME
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines

LAMP = Kind("acme.lamp", "lamp", "read_only", SCHEME, MappingProxyType({}))
"""Of a package: its handler says what is announced."""
OWN = ["system.echo", "system.metrics"]


class Board:
    """A node with a shipped kind and one of a package beside RFC-0001's, and what it has logged."""

    def __init__(self, file: Path | None) -> None:
        self.lines = LogLines()
        kinds = KindRegistry([*rfc_kinds(), read_shipped("linux.health").kind, LAMP])
        capabilities = [{"cap_id": "one", "kind": kind.name} for kind in kinds]
        self.clock = FakeClock(0)
        self.kinds = RelayKinds(capabilities, kinds, file, self.clock, make_logger("kubelet", self.lines))

    @property
    def announced(self) -> list[str]:
        return sorted(each["kind"] for each in self.kinds.capabilities())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "relay_kinds.json"


def test_to_a_relay_that_names_no_kinds_no_shipped_kind_is_announced(file: Path) -> None:
    board = Board(file)
    assert board.announced == [LAMP.name, *OWN]
    assert not board.lines.entries()  # it has not said yet what it knows
    assert not board.kinds.welcomed(None)
    (line,) = board.lines.entries("kinds not announced: the relay does not know them")
    assert line["kinds"] == ["linux.health"]


def test_what_the_relay_names_is_announced_also_after_a_restart(file: Path) -> None:
    board = Board(file)
    assert board.kinds.welcomed([*OWN, "linux.health"])
    assert board.announced == ["linux.health", *OWN]
    assert not board.kinds.welcomed([*OWN, "linux.health", "linux.units"])
    assert Board(file).announced == ["linux.health", *OWN]
    assert Board(file).kinds.welcomed(None)
    assert Board(file).announced == [LAMP.name, *OWN]
    assert not file.exists()


def test_after_a_refusal_only_the_kinds_that_every_relay_knows_are_announced(file: Path) -> None:
    board = Board(file)
    board.kinds.welcomed([*OWN, "linux.health"])
    assert board.kinds.refused()
    assert board.announced == OWN
    assert not board.kinds.refused()
    assert not board.kinds.welcomed(None)
    assert board.kinds.welcomed([*OWN, LAMP.name])
    assert board.announced == [LAMP.name, *OWN]


def test_a_relay_that_names_others_each_time_has_the_file_written_every_ten_seconds_at_most(
    file: Path,
) -> None:
    board, written = Board(file), list[str]()
    for number in range(41):
        board.kinds.welcomed([*OWN, "linux.health"] if number % 2 else [*OWN, f"acme.{number}" * 1000])
        written.append(file.read_text())
        board.clock.advance(1000)
    assert sum(before != after for before, after in pairwise(written)) <= 4
    assert len(max(written, key=len)) < 100
    board.clock.advance(10_000)
    board.kinds.welcomed(OWN)
    assert read_relay_kinds(file) == frozenset(OWN)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "null", '["linux.health"', "\x00"])
def test_a_file_that_holds_no_list_is_as_none(file: Path, text: str) -> None:
    write_atomic(file, text)
    assert read_relay_kinds(file) is None
    assert Board(file).announced == [LAMP.name, *OWN]


def test_a_list_that_cannot_be_kept_counts_all_the_same(tmp_path: Path) -> None:
    board = Board(tmp_path / "missing" / "relay_kinds.json")
    assert board.kinds.welcomed([*OWN, "linux.health"])
    assert board.announced == ["linux.health", *OWN]
    assert board.lines.entries("what the relay knows is not kept")
