"""What may be a label or a tag, and what may not."""

import pytest

from relay.state.name_rules import (
    MAX_TAGS,
    NameRuleError,
    check_tags,
    id_prefix_of,
    label_of,
    node_id_of,
)
from tests.fakes.signer import NODE_ID


@pytest.mark.parametrize(
    "label",
    [
        "greenhouse pi",
        "x",
        "x" * 48,
        "Bob's #3 (left), up/down & more!",
        "garden",
        "pi_01",
        "01hz",
        "7-segment",
    ],
)
def test_a_label_of_printable_ascii_of_up_to_48_characters_is_what_was_written(label: str) -> None:
    assert label_of(label) == label


@pytest.mark.parametrize(
    "label",
    [
        *("", "x" * 49, " pi", "pi ", "a  b", "-pi", "a=b", "*", "a*", "tag:x", "a:b"),
        *(
            "<b>pi</b>",
            "`pi`",
            '"pi"',
            "a\\b",
            "caf\xe9\n",
            "pi\n",
            "pi\x00",
            "\x1b[31mpi",
            "a\tb",
            "a\u202eb",
        ),
    ],
)
def test_what_selects_marks_up_or_cannot_be_printed_is_no_label(label: str) -> None:
    with pytest.raises(NameRuleError, match="is no label"):
        label_of(label)


@pytest.mark.parametrize(
    "label",
    [NODE_ID, NODE_ID.upper(), "z" * 26, "01hzx9", "01HZX9k3m4", "7segment", "deadbeefdeadbeef", "0" * 48],
)
def test_a_label_that_can_be_read_as_an_id_is_refused(label: str) -> None:
    with pytest.raises(NameRuleError, match="read as an id"):
        label_of(label)


@pytest.mark.parametrize("tag", ["gateway", "site=north", "a", "x" * 32, f"{'x' * 32}={'y' * 32}", "_.-=0"])
def test_a_tag_is_a_word_or_a_key_with_a_value(tag: str) -> None:
    check_tags([tag])


@pytest.mark.parametrize(
    "tag", ["", "x" * 33, "a=", "=a", "a=b=c", "North", "a b", "a*", "tag:a", "a\n", "\xe9"]
)
def test_anything_else_is_no_tag(tag: str) -> None:
    with pytest.raises(NameRuleError, match="is no tag"):
        check_tags(["good", tag])


def test_a_node_has_one_value_of_a_key_and_at_most_sixteen_tags() -> None:
    check_tags(f"t{number}" for number in range(MAX_TAGS))
    with pytest.raises(NameRuleError, match="same key"):
        check_tags(["site=north", "site=south"])
    with pytest.raises(NameRuleError, match="at most 16"):
        check_tags(f"t{number}" for number in range(MAX_TAGS + 1))


def test_ids_and_prefixes_are_read_without_regard_to_case() -> None:
    assert (node_id_of(NODE_ID.upper()), node_id_of(NODE_ID[:-1])) == (NODE_ID, None)
    assert (id_prefix_of("01HZX9"), id_prefix_of("01hzx"), id_prefix_of("01hzxu")) == ("01hzx9", None, None)
