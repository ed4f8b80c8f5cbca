"""What may be a label or a tag, and the forms in ASCII of one in the letters of people."""

import pytest

from schemas.labels import (
    MAX_TAGS,
    NameRuleError,
    check_tags,
    columns_of,
    folded,
    id_prefix_of,
    kept_form,
    label_of,
    legible,
    node_id_of,
    shown_form,
    typed_form,
)
from schemas.text import quoted
from tests.fakes.signer import NODE_ID

GREENHOUSE = "Gewächshaus"
KEPT = "xn--Gewchshaus-s5a"


@pytest.mark.parametrize(
    ("label", "typed"),
    [
        (GREENHOUSE, "Gewachshaus"),
        ("Straße 5 (Süd)", "Strasse 5 (Sud)"),
        ("Łódź, Dąb", "Lodz, Dab"),
        ("Nhà kính số 2", "Nha kinh so 2"),
        ("Теплица на севере", "xn--__-zjc0dbnqebaz9a3axzm3f"),
        ("Теплица PLC 3", kept_form("Теплица PLC 3")),
        ("Θερμοκήπιο", "xn--wwa8buardlvdhf"),
        ("温室北側ポンプ", "xn--udkl0e801oo0cisrgs5a"),
        ("온실 펌프", "xn--_-xi5fr7f34tzwb"),
        ("greenhouse pi", "greenhouse pi"),
        ("ग्रीनहाउस पंप 3", kept_form("ग्रीनहाउस पंप 3")),
        ("सड़क श्रीमान्", kept_form("सड़क श्रीमान्")),
        ("ปั๊มน้ำ 2", kept_form("ปั๊มน้ำ 2")),
        ("โรงเรือนเพาะเห็ด", kept_form("โรงเรือนเพาะเห็ด")),
        ("ศูนย์ใหญ่ต่างๆ", kept_form("ศูนย์ใหญ่ต่างๆ")),
    ],
)
def test_a_label_is_shown_in_its_letters_and_every_form_of_it_means_it(label: str, typed: str) -> None:
    assert typed_form(label) == typed
    assert {label_of(label), label_of(kept_form(label)), shown_form(kept_form(label))} == {label}
    assert folded(kept_form(label).upper()) == folded(label)
    assert legible(f"{label}: Echo") == f"{label}: Echo"


def test_what_is_typed_with_combining_accents_is_the_same_label() -> None:
    assert label_of("Gewa\u0308chshaus") == GREENHOUSE


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("अ\u093eम", "a mark of Devanagari", id="a sign on a vowel, like another one"),
        pytest.param("क\u093e\u093e", "a mark of Devanagari", id="two signs on one consonant"),
        pytest.param("\u093eक", "a mark of Devanagari", id="a sign on nothing"),
        pytest.param("pump\u0941", "letters of Devanagari and Latin", id="a sign on Latin"),
        pytest.param("पम्प\u200dक", r"U\+200D is no letter", id="a joiner that cannot be seen"),
        pytest.param("३", r"U\+0969 is no letter", id="a digit that looks like another"),
        pytest.param("दुः", r"U\+0903 is no letter", id="a sign that looks like a colon"),
        pytest.param("\u0e40\u0e40ก", "a mark of Thai", id="two vowels that look like one"),
        pytest.param("กํา", r"U\+0E4D is no letter", id="two parts that look like one vowel"),
        pytest.param("ก้้", "a mark of Thai", id="two marks, one over the other"),
        pytest.param("ก3้", "a mark of Thai", id="a mark on a digit"),
        pytest.param("ปั๊มpump", "letters of Latin and Thai", id="Thai and Latin in one word"),
        pytest.param("\u05e9\u05dc", r"U\+05E9 is written from right to left", id="Hebrew"),
        pytest.param("\u0645\u0646", r"U\+0645 is written from right to left", id="Arabic"),
    ],
)
def test_a_mark_that_deceives_and_letters_from_right_to_left_are_refused_with_the_reason(
    text: str, why: str
) -> None:
    with pytest.raises(NameRuleError, match=why):
        label_of(text)
    assert shown_form(kept_form(text)) == kept_form(text)
    assert legible(text).isascii()


@pytest.mark.parametrize(
    "text", ["xn--", "xn--abc-", "xn--pi", "xn--a-ecp.ru", "xn--99999999", "xn---", "Xn--A"]
)
def test_what_only_begins_like_a_kept_form_is_an_ordinary_label(text: str) -> None:
    assert label_of(text) == shown_form(text) == text


def test_text_that_deceives_is_escaped_where_it_is_shown() -> None:
    for text in ("G\u0430teway", "a\u202eb", "\u05e9\u05dc", "ä\x1b[31m", "ä\nb"):
        assert legible(text).isascii()
        assert legible(text).isprintable()
    assert len(legible("ä" * 300)) == 256


def test_letters_of_double_width_are_counted_as_terminals_show_them() -> None:
    assert [columns_of(text) for text in ("pi", GREENHOUSE, "温室 3", "온실", "ปั๊ม")] == [2, 11, 6, 4, 2]


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


def test_what_is_no_label_is_shown_with_each_escape_once() -> None:
    for label, shown in (("\x1b[31mpi", r"'\x1b[31mpi'"), ("ä=ö", r"'\xe4=\xf6'"), (r"a\b", r"'a\b'")):
        with pytest.raises(NameRuleError) as caught:
            label_of(label)
        assert str(caught.value).startswith(f"{shown} is no label: ")


@pytest.mark.parametrize("letter", ["x", "ä"])
def test_a_label_that_is_too_long_is_shown_whole(letter: str) -> None:
    with pytest.raises(NameRuleError) as caught:
        label_of(letter * 49)
    assert str(caught.value).startswith(f"{quoted(letter * 49)} is no label")


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
