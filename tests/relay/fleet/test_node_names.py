"""A node is found by its id, its label or the beginning of its id, within its tenant alone."""

from collections.abc import Sequence

import pytest

from relay.fleet.node_names import NodeNames, UnknownNodeError
from relay.state.names import NodeName

FIRST, SECOND, THIRD, FOREIGN = (f"01hzx9k3m{mark}p7q8r9s0t1v2w3x" for mark in ("1a", "1b", "22", "1c"))


class Nodes:
    """The nodes of two tenants."""

    def __init__(self) -> None:
        self.tenants = {FIRST: "acme", SECOND: "acme", THIRD: "acme", FOREIGN: "globex"}

    def ids_of(self, tenant: str) -> Sequence[str]:
        return sorted(node_id for node_id, its in self.tenants.items() if its == tenant)

    def tenant_of(self, node_id: str) -> str | None:
        return self.tenants.get(node_id)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


@pytest.fixture
def names(nodes: Nodes) -> NodeNames:
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


def test_a_label_comes_before_a_prefix(nodes: Nodes) -> None:
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
    names: NodeNames, nodes: Nodes
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
