"""The search finds and orders as a search through everything would."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.fleet.node_names import NameSearch, NodeNames
from relay.state.names import NodeName

ACME = "acme"
IDS = [f"01hzx9k3m4p7q8r9s0t1v2w3{number:02}" for number in range(8)]
LABELS = ["pi", "greenhouse pi", "pi of the greenhouse", "api", "north barn", "barn"]
TAGS = ["pi", "site=north", "gateway"]
WORDS = ["pi", "green", "house", "barn", "north", "site=north", "=north", "gate", IDS[0][:23], IDS[3], "zz"]


class Known:
    def ids_of(self, tenant: str) -> Sequence[str]:
        return IDS if tenant == ACME else []

    def tenant_of(self, node_id: str) -> str | None:  # noqa: ARG002 - all of one
        return ACME


def names_of(labels: Sequence[str], tags: Sequence[Sequence[str]]) -> NodeNames:
    names = NodeNames(Known())
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
