"""A node is found by its id, its label or the beginning of its id, within its tenant alone."""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.auth.permissions import Rights
from relay.fleet.node_names import MAX_CLOSE, NameSearch, NodeNames, UnknownNodeError, closest
from schemas.errors import Failure, ToolError
from schemas.labels import NodeName
from tests.fakes.fleet_tools import ECHO_NAME, OTHER_TENANT, READ_ONLY, NodesOfTenants, failure
from tests.fakes.hub import Hub
from tests.fakes.signer import (
    DAY_MS,
    ECHO,
    NODE_ID,
    NOW_MS,
    OTHER_NODE_ID,
    TENANT,
    TTL_MS,
    SimulatedNode,
    key_named,
)

FIRST, SECOND, THIRD, FOREIGN = (f"01hzx9k3m{mark}p7q8r9s0t1v2w3x" for mark in ("1a", "1b", "22", "1c"))


@pytest.fixture
def nodes() -> NodesOfTenants:
    return NodesOfTenants({FIRST: "acme", SECOND: "acme", THIRD: "acme", FOREIGN: "globex"})


@pytest.fixture
def names(nodes: NodesOfTenants) -> NodeNames:
    names = NodeNames(nodes)
    names.change(
        {
            FIRST: NodeName("acme", "Greenhouse Pi", ("gateway", "site=north")),
            SECOND: NodeName("acme", "barn", ("site=north",)),
            FOREIGN: NodeName("globex", "Secret Plan", ("site=north", "nuclear")),
        }
    )
    return names


@pytest.mark.parametrize(
    "reference", [FIRST, FIRST.upper(), "Greenhouse Pi", "greenhouse pi", FIRST[:11], FIRST[:11].upper()]
)
def test_an_id_a_label_or_a_unique_prefix_names_a_node(names: NodeNames, reference: str) -> None:
    assert names.resolve("acme", reference) == FIRST


def test_a_label_comes_before_a_prefix(nodes: NodesOfTenants) -> None:
    # An id that is no ULID, since it begins with a letter: a label can be the beginning of such a one.
    nodes.tenants["garden" + "0" * 20] = "acme"
    names = NodeNames(nodes)
    assert names.resolve("acme", "garden") == "garden" + "0" * 20
    names.change({FIRST: NodeName("acme", "Garden")})
    assert names.resolve("acme", "garden") == FIRST


@pytest.mark.parametrize(
    "reference", ["", "01hzx", "nothing like it", "x" * 5000, "\x1b[31m", FIRST[:-1] + "0"]
)
def test_what_names_no_node_is_an_error_of_one_bounded_line(names: NodeNames, reference: str) -> None:
    with pytest.raises(UnknownNodeError) as raised:
        names.resolve("acme", reference)
    text = str(raised.value)
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 320


def test_a_prefix_that_fits_several_nodes_names_none(names: NodeNames) -> None:
    with pytest.raises(UnknownNodeError, match="fits 2 nodes"):
        names.resolve("acme", FIRST[:10])


def test_a_misspelt_label_brings_the_close_ones(names: NodeNames) -> None:
    with pytest.raises(UnknownNodeError, match="close: Greenhouse Pi") as raised:
        names.resolve("acme", "greenhose pi")
    assert raised.value.close == ("Greenhouse Pi",)


@pytest.mark.parametrize(
    "reference", [FOREIGN, FOREIGN[:11], "Secret Plan", "secret plam", "tag:nuclear", "nuclear=1"]
)
def test_another_tenants_node_does_not_exist_nor_is_its_name_close(names: NodeNames, reference: str) -> None:
    with pytest.raises(UnknownNodeError) as raised:
        names.members("acme", reference)
    assert (raised.value.close, raised.value.candidates) == ((), 0)


def test_selectors_mean_all_nodes_or_those_with_a_tag_or_one(names: NodeNames) -> None:
    assert names.members("acme", "*") == [FIRST, SECOND, THIRD]
    assert names.members("acme", "site=north") == [FIRST, SECOND]
    assert names.members("acme", "tag:site=north") == [FIRST, SECOND]
    assert names.members("acme", "tag:gateway") == [FIRST]
    assert names.members("acme", "barn") == [SECOND]


def test_a_selector_that_means_no_node_is_an_error_with_close_tags(names: NodeNames) -> None:
    with pytest.raises(UnknownNodeError) as raised:
        names.members("acme", "site=nort")
    assert raised.value.close == ("site=north",)
    with pytest.raises(UnknownNodeError) as raised:
        names.members("acme", "tag:gatway")
    assert raised.value.close == ("tag:gateway",)
    assert str(raised.value) == "no node has the tag 'tag:gatway'; close: tag:gateway"
    with pytest.raises(UnknownNodeError):
        names.members("initech", "*")


def test_names_of_a_node_that_is_in_another_tenant_now_are_not_shown_to_it(
    names: NodeNames, nodes: NodesOfTenants
) -> None:
    nodes.tenants[FIRST] = "globex"
    assert (names.label_of(FIRST), names.tags_of(FIRST)) == ("", ())
    for tenant in ("acme", "globex"):
        with pytest.raises(UnknownNodeError):
            names.resolve(tenant, "greenhouse pi")
        assert FIRST not in names.members(tenant, "site=north")
        assert all(label != "Greenhouse Pi" for label, _ in names.labels(tenant))
    assert names.resolve("globex", FIRST) == FIRST


def test_a_node_that_was_named_is_found_before_it_was_ever_seen(names: NodeNames) -> None:
    unseen = FIRST[:-1] + "z"
    names.change({unseen: NodeName("acme", "new one", ("gateway",))})
    for reference in ("new one", unseen):
        assert names.resolve("acme", reference) == unseen
    assert names.members("acme", "tag:gateway") == [FIRST, unseen]
    assert names.label_of(unseen) == "new one"


def test_changes_replace_what_was_before(names: NodeNames) -> None:
    names.change({FIRST: NodeName("acme", "barn"), SECOND: NodeName("acme", "Greenhouse Pi")})
    assert names.resolve("acme", "barn") == FIRST
    assert names.resolve("acme", "greenhouse pi") == SECOND
    names.change({FIRST: None})
    with pytest.raises(UnknownNodeError):
        names.resolve("acme", "barn")
    assert list(names.labels("acme")) == [("Greenhouse Pi", SECOND)]
    assert (names.label_of(FIRST), names.tags_of(FIRST)) == ("", ())
    with pytest.raises(UnknownNodeError):
        names.members("acme", "tag:gateway")


def test_the_differences_are_what_has_to_be_changed(names: NodeNames) -> None:
    wanted = {SECOND: NodeName("acme", "barn", ("site=north",)), THIRD: NodeName("acme", "shed")}
    differences = names.differences(wanted)
    assert differences == {FIRST: None, FOREIGN: None, THIRD: NodeName("acme", "shed")}
    names.change(differences)
    assert names.differences(wanted) == {}


def test_labels_are_listed_by_name(names: NodeNames) -> None:
    assert list(names.labels("acme")) == [("barn", SECOND), ("Greenhouse Pi", FIRST)]
    assert list(names.labels("initech")) == []


@pytest.mark.parametrize(
    "reference",
    ["Gewächshaus 2", "GEWÄCHSHAUS 2", "Gewa\u0308chshaus 2", "gewachshaus 2", "xn--Gewchshaus_2-icb"],
)
def test_a_label_beyond_ascii_is_named_in_its_letters_and_in_ascii(names: NodeNames, reference: str) -> None:
    names.change({THIRD: NodeName("acme", "Gewächshaus 2")})
    assert names.resolve("acme", reference) == THIRD
    names.change({THIRD: None})
    with pytest.raises(UnknownNodeError):
        names.resolve("acme", reference)


def test_what_is_typed_for_two_labels_names_neither_but_an_ascii_label_keeps_its_own(
    names: NodeNames,
) -> None:
    # Two relays can give two such labels at once; one alone refuses the second.
    names.change({SECOND: NodeName("acme", "Wärme"), THIRD: NodeName("acme", "Wárme")})
    with pytest.raises(UnknownNodeError):
        names.resolve("acme", "warme")
    assert names.resolve("acme", "wärme") == SECOND
    names.change({FIRST: NodeName("acme", "warme")})
    assert names.resolve("acme", "warme") == FIRST


def test_an_error_shows_a_reference_in_its_letters_unless_they_deceive(names: NodeNames) -> None:
    names.change({THIRD: NodeName("acme", "Gewächshaus")})
    with pytest.raises(UnknownNodeError, match=r"'Gewächshäuser' is no .*; close: Gewächshaus"):
        names.resolve("acme", "Gewächshäuser")
    with pytest.raises(UnknownNodeError, match=r"'G\\u0430teway' is no"):
        names.resolve("acme", "G\u0430teway")


# --- names --------------------------------------------------------------------------------------------


def titles(hub: Hub, tenant: str = TENANT) -> set[str]:
    return {tool.listed()["title"] for tool in hub.fleet.selected.listed(Rights(tenant, READ_ONLY))}


def test_a_label_is_in_the_titles_from_the_first_manifest_on_and_after_it_is_changed(
    hub: Hub, node: SimulatedNode
) -> None:
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi")})
    hub.connect(node)
    assert titles(hub) == {"greenhouse pi: CPU, memory, disks", "greenhouse pi: Echo"}
    before = hub.fleet.selected.version(Rights(TENANT, READ_ONLY))
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "barn")})
    assert titles(hub) == {"barn: CPU, memory, disks", "barn: Echo"}
    assert hub.fleet.selected.version(Rights(TENANT, READ_ONLY)) != before
    assert hub.fleet.resolve(ECHO_NAME, Rights(TENANT, READ_ONLY)).label == "barn"
    hub.fleet.rename({NODE_ID: None})
    assert titles(hub) == {"CPU, memory, disks", "Echo"}


def test_a_label_beyond_ascii_is_in_the_titles_in_its_letters(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "Gewächshaus")})
    hub.connect(node)
    assert titles(hub) == {"Gewächshaus: CPU, memory, disks", "Gewächshaus: Echo"}
    for tool in hub.fleet.selected.listed(Rights(TENANT, READ_ONLY)):
        assert tool.listed_text().isascii()
        assert json.loads(tool.listed_text()) == tool.listed()


def test_a_tag_changes_no_title_and_no_version(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    before = hub.fleet.selected.version(Rights(TENANT, READ_ONLY))
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "", ("gateway",))})
    assert hub.fleet.selected.version(Rights(TENANT, READ_ONLY)) == before


def test_a_node_that_moves_to_another_tenant_leaves_its_label_behind(hub: Hub) -> None:
    key = key_named("a node that moved")
    old = hub.ca.issue(NODE_ID, OTHER_TENANT, key=key, now_ms=NOW_MS - DAY_MS)
    hub.fleet.rename({NODE_ID: NodeName(OTHER_TENANT, "secret plan")})
    hub.connect(old)
    assert titles(hub, OTHER_TENANT) == {"secret plan: CPU, memory, disks", "secret plan: Echo"}
    hub.fleet.offer_identity(NODE_ID, hub.ca.issue(NODE_ID, TENANT, key=key).leaf_pem)
    assert titles(hub, OTHER_TENANT) == set()
    assert titles(hub) == {"CPU, memory, disks", "Echo"}
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "barn")})
    assert titles(hub) == {"barn: CPU, memory, disks", "barn: Echo"}


# --- resolving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [ECHO_NAME, ECHO_NAME.replace(".", "-")], ids=["canonical", "dashed"])
def test_both_forms_of_a_name_are_the_same_tool(hub: Hub, node: SimulatedNode, name: str) -> None:
    hub.connect(node)
    assert hub.fleet.resolve(name, Rights(TENANT, READ_ONLY)).canonical == ECHO_NAME


NODE_NAMES = {
    "a verb": f"sysecho.{NODE_ID}.echo.snapshot",
    "a capability": f"sysecho.{NODE_ID}.other.invoke",
    "a verb without a row": f"sys.{NODE_ID}.sysmetrics.subscribe",
}


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, id=f"{what} that the node has not") for what, name in NODE_NAMES.items()),
        pytest.param("", id="empty"),
        pytest.param("echo", id="no name of a tool"),
        pytest.param(ECHO_NAME.upper(), id="upper case"),
        pytest.param(ECHO_NAME + " ", id="with a tail"),
        pytest.param(ECHO_NAME.replace(".", "-", 1), id="mixed"),
        pytest.param("\x1b[31m" * 1000, id="hostile"),
    ],
)
def test_a_name_that_is_none_is_unknown(hub: Hub, node: SimulatedNode, name: str) -> None:
    hub.connect(node)
    assert failure(hub, name) is Failure.NAME_UNKNOWN


def test_a_kind_that_is_not_registered_is_said_so(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    assert failure(hub, f"gpio.{NODE_ID}.echo.invoke") is Failure.KIND_UNSUPPORTED


@pytest.mark.holds("RFC-0005/5/scope")
def test_another_tenants_node_cannot_be_told_from_one_that_exists_nowhere(
    hub: Hub, node: SimulatedNode
) -> None:
    hub.connect(node)
    absent = f"sysecho.{OTHER_NODE_ID}.echo.invoke"
    for name in (ECHO_NAME, *NODE_NAMES.values(), f"gpio.{NODE_ID}.echo.invoke", absent):
        with pytest.raises(ToolError) as caught:
            hub.fleet.resolve(name, Rights(OTHER_TENANT, READ_ONLY))
        assert caught.value.failure is Failure.SAFETY_DENIED
        assert caught.value.detail is None


@pytest.mark.holds("RFC-0001/1/expired-is-invalid")
def test_a_manifest_that_has_expired_or_was_rejected_is_invalid(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert failure(hub, ECHO_NAME) is Failure.MANIFEST_NOT_FOUND
    hub.fleet.offer_manifest(NODE_ID, b"{}", "broker")
    assert failure(hub, ECHO_NAME) is Failure.MANIFEST_INVALID
    hub.connect(node)
    hub.fleet.resolve(ECHO_NAME, Rights(TENANT, READ_ONLY))
    hub.clock.advance(TTL_MS)
    assert failure(hub, ECHO_NAME) is Failure.MANIFEST_INVALID


def test_a_node_whose_manifest_is_trusted_can_be_resolved_though_it_is_not_connected(
    hub: Hub, node: SimulatedNode
) -> None:
    hub.announce(node)
    assert hub.fleet.resolve(ECHO_NAME, Rights(TENANT, READ_ONLY)).node_id == NODE_ID


def test_no_text_of_a_stranger_gets_into_the_log(hub: Hub, node: SimulatedNode) -> None:
    hub.announce(node)
    hostile: dict[str, Any] = {**ECHO, "cap_id": "\x1b[31m\u202e"}
    hub.fleet.offer_manifest(NODE_ID, node.manifest(capabilities=[hostile]), "broker")
    hub.fleet.offer_identity(NODE_ID, "\x1b[31m")
    text = hub.lines.getvalue()
    assert "[31m" not in text
    assert len(hub.lines.entries()) == 3


NAMES = sorted(["barn pi", "greenhouse gateway", "greenhouse pi", "pump", "roof camera", "shed"])


def by_word(names: list[str]) -> dict[str, list[str]]:
    words = defaultdict[str, list[str]](list)
    for name in names:
        for word in name.split():
            words[word].append(name)
    return words


def test_a_misspelt_name_finds_the_one_that_was_meant() -> None:
    assert closest("grenhouse pi", NAMES)[0] == "greenhouse pi"
    assert closest("zhed", NAMES) == ["shed"]


def test_a_name_that_shares_a_word_is_found_wherever_it_is() -> None:
    crowd = sorted([*(f"b{number:04}" for number in range(5000)), "roof camera"])
    assert closest("a camera", crowd) == []
    assert closest("a camera", crowd, by_word(crowd)) == ["roof camera"]


def test_of_several_words_the_rarest_leads_to_the_name() -> None:
    crowd = sorted([*(f"node pi {number:04}" for number in range(5000)), "the pi zebra"])
    assert closest("node zebra pi", crowd, by_word(crowd))[0] == "the pi zebra"


def test_nothing_is_close_to_what_is_like_no_name_and_never_more_than_three_are_shown() -> None:
    assert closest("xxxxxxxxxxxxxxxx", NAMES) == []
    assert closest("", NAMES) == []
    assert len(closest("node 1", [f"node {number}" for number in range(10, 20)])) == MAX_CLOSE


ACME = "acme"
IDS = [f"01hzx9k3m4p7q8r9s0t1v2w3{number:02}" for number in range(8)]
LABELS = ["pi", "greenhouse pi", "pi of the greenhouse", "api", "north barn", "barn"]
TAGS = ["pi", "site=north", "gateway"]
WORDS = ["pi", "green", "house", "barn", "north", "site=north", "=north", "gate", IDS[0][:23], IDS[3], "zz"]


def names_of(labels: Sequence[str], tags: Sequence[Sequence[str]]) -> NodeNames:
    names = NodeNames(NodesOfTenants(dict.fromkeys(IDS, ACME)))
    new = [NodeName(ACME, label, tuple(of)) for label, of in zip(labels, tags, strict=False)]
    names.change({id_: name for id_, name in zip(IDS, new, strict=False) if name.label or name.tags})
    return names


def by_reading_all(names: NodeNames, query: str) -> list[str]:
    words = query.lower().split()

    def text(node_id: str) -> str:
        return f" {names.label_of(node_id)}\n" + "".join(f" {tag}" for tag in names.tags_of(node_id))

    def fits(node_id: str) -> bool:
        return all(word in text(node_id) or (len(word) >= 6 and node_id.startswith(word)) for word in words)

    def rank(node_id: str) -> tuple[int, int, str, str]:
        label = names.label_of(node_id)
        is_named = bool(label or names.tags_of(node_id))
        if not words:
            group = 0 if is_named else 9
        elif is_named and all(f" {word}" in text(node_id) for word in words):
            group = 0 if label == " ".join(words) else 1
        elif is_named:
            group = 2
        else:
            group = 9
        return group, 0 if label else 1, label, node_id

    return sorted(filter(fits, IDS), key=rank)


@given(
    labels=st.permutations([*LABELS, "", ""]),
    tags=st.lists(st.lists(st.sampled_from(TAGS), unique=True).map(sorted), min_size=8, max_size=8),
    words=st.lists(st.sampled_from(WORDS), max_size=3, unique=True),
)
def test_the_order_is_that_of_the_rule(
    labels: Sequence[str], tags: Sequence[Sequence[str]], words: Sequence[str]
) -> None:
    names = names_of(labels, tags)
    query = " ".join(words)
    found = NameSearch(names).ranked(ACME, IDS, query)
    expected = by_reading_all(names, query)
    # An unnamed node fits several words only if all begin its id, which is no search.
    assert found == [node_id for node_id in expected if len(words) < 2 or is_named(names, node_id)]


def is_named(names: NodeNames, node_id: str) -> bool:
    return bool(names.label_of(node_id) or names.tags_of(node_id))


@pytest.mark.parametrize(
    ("query", "labels"),
    [
        ("pi", ["pi", "greenhouse pi", "pi of the greenhouse", "api"]),
        ("greenhouse pi", ["greenhouse pi", "pi of the greenhouse"]),
        ("PI  green", ["greenhouse pi", "pi of the greenhouse"]),
        ("house", ["greenhouse pi", "pi of the greenhouse"]),
    ],
)
def test_better_matches_are_first(query: str, labels: list[str]) -> None:
    names = names_of(LABELS, [()] * 8)
    assert [names.label_of(node_id) for node_id in NameSearch(names).ranked(ACME, IDS, query)] == labels


def test_a_search_sees_the_newest_names() -> None:
    names = names_of(LABELS, [()] * 8)
    search = NameSearch(names)
    assert search.ranked(ACME, IDS, "api") == [IDS[3]]
    names.change({IDS[3]: NodeName(ACME, "attic")})
    assert search.ranked(ACME, IDS, "api") == []
    assert search.ranked(ACME, IDS, "attic") == [IDS[3]]
    names.change({IDS[3]: None})
    assert search.ranked(ACME, IDS, "attic") == []


def test_another_tenants_names_are_not_searched() -> None:
    names = names_of(LABELS, [()] * 8)
    assert NameSearch(names).ranked("globex", [], "pi") == []


@pytest.mark.parametrize("query", ["gewächs", "GEWACHSHAUS", "haus"])
def test_a_label_beyond_ascii_is_searched_in_its_letters_and_as_it_is_typed(query: str) -> None:
    search = NameSearch(names_of(["barn", "Gewächshaus"], [(), ()]))
    assert search.ranked(ACME, IDS, query) == [IDS[1]]
