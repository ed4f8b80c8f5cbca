"""The operator's labels and tags are kept, one label for one node of a tenant."""

import json
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from relay.auth.permissions import Rights
from relay.state.kinds import NAME
from relay.state.ledger import LedgerError
from relay.state.merging import SIGNED, Merging, SharedLedger
from relay.state.names import NAMES, LabelTakenError, NameLedger, Names
from schemas.labels import NameRuleError, NodeName
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID

GREENHOUSE = "Gewächshaus"
KEPT = "xn--Gewchshaus-s5a"
GOOD = {"action": "name", "ts_ms": 1, "node_id": NODE_ID, "tenant": "acme", "label": "pi", "tags": ["a"]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node_names.jsonl"


@pytest.fixture
def ledger(path: Path) -> NameLedger:
    return NameLedger(path, FakeClock(NOW_MS))


def names_in(path: Path) -> dict[str, NodeName]:
    return dict(NameLedger(path, FakeClock(NOW_MS)).read().by_node)


def test_what_was_named_stays_named(ledger: NameLedger, path: Path) -> None:
    assert names_in(path) == {}
    assert not path.exists()
    ledger.label(NODE_ID, "acme", "Greenhouse Pi")
    ledger.tag(NODE_ID, "acme", ["site=north", "gateway"])
    assert names_in(path) == {NODE_ID: NodeName("acme", "Greenhouse Pi", ("gateway", "site=north"))}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_change_leaves_what_was_read_before_as_it_was(ledger: NameLedger) -> None:
    ledger.label(NODE_ID, "acme", "pi")
    before = ledger.read()
    ledger.label(NODE_ID, "acme", "other")
    assert before.by_node[NODE_ID].label == "pi"


def test_by_a_name_of_another_relay_tokens_reach_a_node_once_that_has_signed_it() -> None:
    greenhouse, barn = Rights.of("acme", (), nodes=("tag:a",)), Rights.of("acme", (), nodes=("tag:b",))
    not_a = Rights.of("acme", (), nodes=("*", "!tag:a"))

    def reached(*lines: Mapping[str, object]) -> tuple[bool, bool, bool]:
        names = Names()
        for line in lines:
            names.apply({**GOOD, **line})
        name = names.with_proven().get(NODE_ID, NodeName("acme"))
        admits = [rights.admit_node(NODE_ID, name) for rights in (greenhouse, barn, not_a)]
        return admits[0], admits[1], admits[2]

    shared, signed = {"shared": True}, {"shared": True, "signed": True}
    assert reached({}) == (True, False, False)
    assert reached(shared) == (False, False, False)  # it opens nothing, but excludes
    assert reached(signed) == (True, False, False)
    assert reached({}, shared) == (True, False, False)  # it has come back from the others
    assert reached({}, {**shared, "tags": ["b"]}) == (True, False, False)
    assert reached({}, {**signed, "tags": ["b"]}) == (False, True, True)
    assert reached({**shared, "tags": ["b"]}, {"tags": ["b"]}) == (False, True, True)
    assert reached({}, {**shared, "action": "forget"}) == (True, False, False)
    assert reached({}, {**signed, "action": "forget"}) == (False, False, True)
    assert reached({}, {**shared, "tenant": "globex"}) == (False, False, False)


def test_a_name_that_a_relay_has_signed_is_written_over_the_same_without() -> None:
    entry = {"node_id": NODE_ID, "tenant": "acme", "label": "pi", "tags": ["a"]}
    names = Names()
    names.apply({**GOOD, "shared": True})
    assert NAMES.has(names, entry)
    assert not NAMES.has(names, entry | {"signed": True})
    names.apply(NAMES.line(names, entry | {"signed": True}, NOW_MS) | {"shared": True})
    assert NAMES.has(names, entry | {"signed": True})


def test_a_name_that_comes_back_signed_is_shared_and_one_of_another_relay_reaches_the_node(
    ledger: NameLedger,
) -> None:
    shared = SharedLedger(NAME, ledger.ledger, Merging(FakeClock(NOW_MS), make_logger("relay", LogLines())))
    ledger.tag(NODE_ID, "acme", ["a"])
    missing = shared.settle({}, set())
    assert missing.keys() == ledger.read().unshared.keys() == {NODE_ID}
    shared.settle({NODE_ID: {**missing[NODE_ID], SIGNED: True}}, {NODE_ID})
    assert ledger.read().unshared == {}
    other = {"node_id": NODE_ID, "tenant": "acme", "label": None, "tags": ["b"]}
    by_tag = Rights.of("acme", (), nodes=("tag:b",))
    for entry, is_reached in ((other, False), ({**other, SIGNED: True}, True)):
        shared.settle({NODE_ID: entry}, {NODE_ID})
        assert by_tag.admit_node(NODE_ID, ledger.read().with_proven()[NODE_ID]) is is_reached


def test_a_label_is_unique_within_a_tenant_without_regard_to_case(ledger: NameLedger, path: Path) -> None:
    ledger.label(NODE_ID, "acme", "pi")
    with pytest.raises(LabelTakenError, match=NODE_ID):
        ledger.label(OTHER_NODE_ID, "acme", "PI")
    ledger.label(NODE_ID, "acme", "Pi")  # its own, in other letters
    ledger.label(OTHER_NODE_ID, "globex", "pi")
    assert {each.label for each in names_in(path).values()} == {"Pi", "pi"}


def test_a_label_that_was_taken_away_is_free(ledger: NameLedger, path: Path) -> None:
    ledger.label(NODE_ID, "acme", "pi")
    ledger.label(NODE_ID, "acme", "")
    ledger.label(OTHER_NODE_ID, "acme", "pi")
    ledger.forget(OTHER_NODE_ID)
    ledger.label(NODE_ID, "acme", "pi")
    assert names_in(path) == {NODE_ID: NodeName("acme", "pi")}


def test_a_tag_replaces_that_of_the_same_key_and_others_are_removed_by_theirs(
    ledger: NameLedger, path: Path
) -> None:
    ledger.tag(NODE_ID, "acme", ["site=north", "gateway", "old"])
    ledger.tag(NODE_ID, "acme", ["site=south"], remove=["gateway", "old=whatever", "absent"])
    assert names_in(path) == {NODE_ID: NodeName("acme", "", ("site=south",))}
    ledger.tag(NODE_ID, "acme", remove=["site"])
    assert names_in(path) == {}


def test_names_of_the_tenant_that_a_node_was_in_before_are_not_taken_over(
    ledger: NameLedger, path: Path
) -> None:
    ledger.label(NODE_ID, "acme", "secret plan")
    ledger.tag(NODE_ID, "globex", ["gateway"])
    assert names_in(path) == {NODE_ID: NodeName("globex", "", ("gateway",))}


def test_a_node_that_was_forgotten_has_no_names_and_is_a_node_again_when_it_is_named(
    ledger: NameLedger, path: Path
) -> None:
    ledger.tag(NODE_ID, "acme", ["gateway"])
    for _ in range(2):
        ledger.forget(NODE_ID)
    assert (ledger.read().by_node, ledger.read().forgotten) == ({}, {NODE_ID})
    assert len(path.read_text().splitlines()) == 2
    ledger.label(NODE_ID, "acme", "pi")
    assert ledger.read().forgotten == set()


def test_what_changes_nothing_is_not_written(ledger: NameLedger, path: Path) -> None:
    ledger.label(NODE_ID, "acme", "pi")
    before = path.read_bytes()
    ledger.label(NODE_ID, "acme", "pi")
    ledger.tag(NODE_ID, "acme", remove=["absent"])
    assert path.read_bytes() == before


def test_what_is_no_label_or_tag_is_not_written(ledger: NameLedger, path: Path) -> None:
    with pytest.raises(NameRuleError):
        ledger.label(NODE_ID, "acme", "a=b")
    with pytest.raises(NameRuleError):
        ledger.tag(NODE_ID, "acme", ["A"])
    ledger.tag(NODE_ID, "acme", [f"t{number}" for number in range(16)])
    with pytest.raises(NameRuleError, match="at most 16"):
        ledger.tag(NODE_ID, "acme", ["one-more"])
    assert len(names_in(path)[NODE_ID].tags) == 16


def test_a_node_that_enrols_has_its_names_at_once_and_the_same_after_a_repetition(
    ledger: NameLedger, path: Path
) -> None:
    for _ in range(2):
        assert ledger.name_new(NODE_ID, "acme", "pi", ["site=north"])
    assert names_in(path) == {NODE_ID: NodeName("acme", "pi", ("site=north",))}
    assert len(path.read_text().splitlines()) == 1


def test_a_node_that_enrols_with_a_label_that_is_taken_by_now_has_its_tags_alone(
    ledger: NameLedger, path: Path
) -> None:
    ledger.label(OTHER_NODE_ID, "acme", "pi")
    assert not ledger.name_new(NODE_ID, "acme", "pi", ["gateway"])
    assert names_in(path)[NODE_ID] == NodeName("acme", "", ("gateway",))


def test_what_the_operator_has_named_meanwhile_is_kept_when_an_enrolment_is_repeated(
    ledger: NameLedger, path: Path
) -> None:
    ledger.name_new(NODE_ID, "acme", "pi", [])
    ledger.label(NODE_ID, "acme", "better")
    assert not ledger.name_new(NODE_ID, "acme", "pi", ["gateway"])
    assert names_in(path) == {NODE_ID: NodeName("acme", "better")}


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["no entry"], id="no JSON"),
        pytest.param([[]], id="no object"),
        pytest.param([{**GOOD, "action": "revoke"}], id="another action"),
        pytest.param([{"action": "forget", "ts_ms": 1}], id="no node"),
        pytest.param([{**GOOD, "node_id": "x"}], id="not a node's id"),
        pytest.param([{**GOOD, "tenant": None}], id="no tenant"),
        pytest.param([{**GOOD, "label": "\x1b[31m"}], id="control characters"),
        pytest.param([{**GOOD, "label": 1}], id="a label that is no text"),
        pytest.param([{**GOOD, "tags": "a"}], id="tags that are no list"),
        pytest.param([{**GOOD, "tags": ["A"]}], id="no tag"),
        pytest.param([{**GOOD, "tags": [1]}], id="a tag that is no text"),
        pytest.param([GOOD, {**GOOD, "node_id": OTHER_NODE_ID}], id="one label for two nodes"),
    ],
)
def test_a_damaged_ledger_is_an_error_and_never_an_empty_one(
    ledger: NameLedger, path: Path, lines: list[object]
) -> None:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_text(text)
    with pytest.raises(LedgerError, match=path.name):
        ledger.read()
    with pytest.raises(LedgerError, match=path.name):
        ledger.label(NODE_ID, "acme", "pi")
    assert path.read_text() == text


def test_what_is_kept_is_ascii_that_the_shared_document_has_admitted_from_the_first(
    ledger: NameLedger, path: Path
) -> None:
    ledger.label(NODE_ID, "acme", GREENHOUSE)
    (line,) = map(json.loads, path.read_text().splitlines())
    assert line["label"] == KEPT
    entry = {key: line[key] for key in ("node_id", "tenant", "label", "tags")}
    assert SchemaRegistry().load("cluster.name@1.0.0").is_valid(entry)
    assert ledger.read().by_node == {NODE_ID: NodeName("acme", GREENHOUSE)}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (GREENHOUSE, "gewächsHAUS"),
        (GREENHOUSE, "Gewachshaus"),
        ("Gewachshaus", GREENHOUSE),
        (GREENHOUSE, KEPT),
        ("Gewächshaus", "Gewáchshaus"),
        ("OCA", "\u041e\u0421\u0410"),  # in Cyrillic
        ("\u041e\u0421\u0410", "oca"),
        ("\u03a4\u0391\u039d\u039a", "TANK"),
        ("\u53e3", "\u30ed"),  # a mouth, and the syllable ro
        ("सड़क", "सडक"),  # but for a dot
    ],
)
def test_two_labels_of_a_tenant_do_not_look_alike(ledger: NameLedger, first: str, second: str) -> None:
    ledger.label(NODE_ID, "acme", first)
    with pytest.raises(LabelTakenError, match=NODE_ID):
        ledger.label(OTHER_NODE_ID, "acme", second)
    assert not ledger.name_new(OTHER_NODE_ID, "acme", second, ())
    ledger.label(OTHER_NODE_ID, "globex", second)
    ledger.label(NODE_ID, "acme", second)  # its own
    ledger.label(NODE_ID, "acme", "")
    ledger.label(OTHER_NODE_ID, "acme", first)  # free again
