from collections import defaultdict

from relay.fleet.node_names import MAX_CLOSE, closest

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
