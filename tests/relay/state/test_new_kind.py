"""A new kind of state is a row and a document: it is merged, watched, backed up, restored and bounded."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from relay.cli.backup.another_relay import save_for_another_relay
from relay.cli.backup.state import restore, save
from relay.pki.authority import CertificateAuthority
from relay.server.decisions import Applied, watched
from relay.settings.config import StateFiles
from relay.settings.kept import KeptSettings
from relay.state.kinds import KINDS, StateFile, StateKind, shared_ledgers
from relay.state.ledger import WORTH_COMPACTING, Entry, Ledger
from relay.state.merging import Merging, Rule, SharedLedger
from schemas.process.logs import make_logger
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.plain_state import PlainEntries, plain_form
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID

RULES = (Rule.FINAL, Rule.ORDERED, Rule.ENDORSED, Rule.ISSUED)
FIRST, SECOND = ({"node_id": node_id, "muted": True} for node_id in (NODE_ID, OTHER_NODE_ID))


def mutes_by(rule: Rule, *, copied: bool = True) -> StateKind:
    """Return the row of a kind that only these tests have."""
    file = StateFile(
        "mutes",
        "mutes.jsonl",
        "the nodes that are muted",
        lambda: PlainEntries("node_id", ordered=rule is Rule.ORDERED),
        copied=copied,
    )
    return StateKind("mute", file, rule, plain_form("node_id"))


class Side:
    """The file of one relay, and what it has in common with others."""

    def __init__(self, directory: Path, rule: Rule, *, issues: bool = False) -> None:
        directory.mkdir(mode=0o700)
        kind = mutes_by(rule)
        self.ledger: Ledger[Any] = Ledger(kind.file.in_directory(directory), kind.file.empty())
        merging = Merging(
            FakeClock(NOW_MS),
            make_logger("relay", LogLines()),
            issues=issues,
            is_endorsed={"mute": lambda entry: entry["muted"] is True},
        )
        files: dict[StateFile, Ledger[Any]] = {kind.file: self.ledger}
        (self.shared,) = shared_ledgers(files, merging, [kind])

    def decide(self, *entries: Entry) -> None:
        with self.ledger.locked():
            self.ledger.append(*({"ts_ms": NOW_MS, **entry} for entry in entries))

    @property
    def entries(self) -> dict[str, Entry]:
        return dict(self.ledger.read().by_key)


def settled(stream: dict[str, Entry], *sides: SharedLedger) -> None:
    """Let relays append to ``stream`` what it lacks, and take what it has, until nothing changes."""
    for _ in range(4):
        for shared in sides:
            for key, entry in shared.settle(dict(stream), set(stream)).items():
                stream.pop(key, None)
                stream[key] = entry
                shared.settle({key: entry}, set(stream))


@pytest.mark.parametrize("rule", RULES)
def test_what_one_relay_decides_every_other_has(tmp_path: Path, rule: Rule) -> None:
    one, other = Side(tmp_path / "one", rule, issues=True), Side(tmp_path / "other", rule)
    stream: dict[str, Entry] = {}
    one.decide(FIRST, SECOND)
    settled(stream, one.shared, other.shared)
    assert other.entries == one.entries == {NODE_ID: FIRST, OTHER_NODE_ID: SECOND}
    # A relay that was away, and servers that have lost all, are told again.
    late = Side(tmp_path / "late", rule)
    settled(stream, late.shared)
    assert late.entries == one.entries
    before = dict(stream)
    stream.clear()
    settled(stream, one.shared, other.shared)
    assert stream == before


@pytest.mark.parametrize("rule", RULES)
def test_of_two_decisions_on_one_key_the_rule_says_which_counts(tmp_path: Path, rule: Rule) -> None:
    one, other = Side(tmp_path / "one", rule, issues=True), Side(tmp_path / "other", rule)
    stream: dict[str, Entry] = {}
    one.decide(FIRST)
    settled(stream, one.shared, other.shared)
    changed = FIRST | {"muted": False}
    other.decide(changed)
    settled(stream, other.shared, one.shared)
    assert one.entries[NODE_ID] == (changed if rule is Rule.ORDERED else FIRST)


def test_what_is_not_endorsed_and_what_another_issues_is_not_taken(tmp_path: Path) -> None:
    forged = {"node_id": NODE_ID, "muted": False}
    for rule, issues in ((Rule.ENDORSED, False), (Rule.ISSUED, True)):
        side = Side(tmp_path / rule, rule, issues=issues)
        side.shared.settle({NODE_ID: forged}, {NODE_ID})
        assert side.entries == {}


def test_an_endorsed_kind_without_a_judge_is_refused_when_the_relay_is_composed() -> None:
    kind = mutes_by(Rule.ENDORSED)
    files: dict[StateFile, Ledger[Any]] = {kind.file: Ledger(Path("unused"), kind.file.empty())}
    with pytest.raises(ValueError, match="which entries of mute are endorsed"):
        shared_ledgers(files, Merging(FakeClock(NOW_MS), make_logger("relay", LogLines())), [kind])


def test_a_row_that_nothing_applies_is_refused_when_the_relay_is_composed() -> None:
    kind = mutes_by(Rule.FINAL)
    ledgers: dict[StateFile, Ledger[Any]] = {kind.file: Ledger(Path("unused"), kind.file.empty())}
    acts = Applied[object](lambda: None, lambda _: None, lambda _: None)
    with pytest.raises(ValueError, match="mutes"):
        watched(ledgers, {}, [kind])
    with pytest.raises(KeyError):
        watched({}, {kind.file: acts}, [kind])
    (file,) = watched(ledgers, {kind.file: acts}, [kind])
    assert (file.name, file.kinds, file.stamp()) == ("mutes", ["mute"], (ledgers[kind.file].stamp, None))


@pytest.mark.parametrize("expected", [{"save"}, {"save", "copy"}], ids=["own", "copied"])
def test_it_is_in_the_backup_and_in_another_relays_copy_if_its_row_says_so(
    tmp_path: Path, expected: set[str]
) -> None:
    kinds = (*KINDS, mutes_by(Rule.FINAL, copied="copy" in expected))
    state = StateFiles(tmp_path / "relay")
    ca = CertificateAuthority(state.ca, FakeClock(NOW_MS), os.urandom)
    ca.create()
    (state.root / "mutes.jsonl").write_text("{}\n")
    archives = {
        "save": save(state, ca, NOW_MS, kinds),
        "copy": save_for_another_relay(state, ca, KeptSettings(), NOW_MS, os.urandom, kinds=kinds),
    }
    for name, archive in archives.items():
        restore(archive, StateFiles(tmp_path / name), kinds)
    assert {name for name in archives if (tmp_path / name / "mutes.jsonl").exists()} == expected


def test_a_file_whose_lines_may_leave_is_compacted_once_most_have_ended(tmp_path: Path) -> None:
    path = tmp_path / "mutes.jsonl"

    def last(state: PlainEntries) -> Sequence[Entry]:
        return list(state.by_key.values())

    ledger = Ledger(path, PlainEntries("node_id", ordered=True), lasting=last)
    reader = Ledger(path, PlainEntries("node_id", ordered=True))
    for number in range(WORTH_COMPACTING):
        with ledger.locked():
            ledger.append({"node_id": NODE_ID, "number": number})
        assert reader.read().by_key[NODE_ID]["number"] == number
    assert len(path.read_text().splitlines()) == 1
    assert path.stat().st_mode & 0o777 == 0o600
