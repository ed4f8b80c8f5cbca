import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.projection import MAX_NAME, ToolName, is_node_id, parse

NODE = "01hzx9k3m4p7q8r9s0t1v2w3xy"
NAMES = st.builds(
    ToolName,
    kind_short=st.from_regex(r"[a-z][a-z0-9_]{0,7}", fullmatch=True),
    node_id=st.from_regex(r"[0-9a-hjkmnp-tv-z]{26}", fullmatch=True),
    cap_id=st.from_regex(r"[a-z][a-z0-9_]{0,17}", fullmatch=True),
    verb=st.sampled_from(["snapshot", "subscribe", "get", "set", "invoke", "stream"]),
)


@pytest.mark.holds("RFC-0001/3/one-tool-each")
@given(NAMES)
def test_both_forms_of_a_name_are_read_back_as_the_name(name: ToolName) -> None:
    assert parse(name.canonical) == parse(name.alias) == name


@given(NAMES)
def test_both_forms_keep_to_the_alphabets_that_clients_take(name: ToolName) -> None:
    assert re.fullmatch(r"[a-z0-9_.]{1,64}", name.canonical)
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name.alias)


@given(st.text(alphabet="sy01hzx.-_\n A", max_size=70))
def test_any_other_text_is_no_name_or_one_that_is_written_the_same(text: str) -> None:
    name = parse(text)
    assert name is None or text in (name.canonical, name.alias)


@pytest.mark.holds("RFC-0001/3.1/name-budget")
@pytest.mark.parametrize(
    ("text", "length", "name"),
    [
        pytest.param(
            f"sysecho.{NODE}.echo.invoke",
            46,
            ToolName("sysecho", NODE, "echo", "invoke"),
            id="rfc-0005-section-2",
        ),
        pytest.param(
            f"sys.{NODE}.sysmetrics.snapshot",
            50,
            ToolName("sys", NODE, "sysmetrics", "snapshot"),
            id="rfc-0001-section-5-5-snapshot",
        ),
        pytest.param(
            f"sys.{NODE}.sysmetrics.subscribe",
            51,
            ToolName("sys", NODE, "sysmetrics", "subscribe"),
            id="rfc-0001-section-5-5-subscribe",
        ),
        pytest.param(
            f"abcdefgh.{NODE}.abcdefghijklmnopqr.subscribe",
            64,
            ToolName("abcdefgh", NODE, "abcdefghijklmnopqr", "subscribe"),
            id="rfc-0001-section-3-1-at-the-limit",
        ),
    ],
)
def test_the_names_in_the_rfcs_have_the_lengths_that_they_state(
    text: str, length: int, name: ToolName
) -> None:
    assert len(text) == length <= MAX_NAME
    assert parse(text) == name
    assert name.canonical == text
    assert name.alias == text.replace(".", "-")
    assert len(name.alias) == length


@pytest.mark.holds("RFC-0001/3.1/name-budget")
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("system.echo", id="the-kind"),
        pytest.param(f"sysecho.{NODE}.echo", id="three-tokens"),
        pytest.param(f"sysecho.{NODE}.echo.invoke.now", id="five-tokens"),
        pytest.param(f"sysecho.{NODE}..invoke", id="an-empty-token"),
        pytest.param(f"sysecho.{NODE}.echo-invoke", id="both-separators"),
        pytest.param(f"sysecho_{NODE}_echo_invoke", id="underscores"),
        pytest.param(f"sysecho.{NODE.upper()}.echo.invoke", id="an-id-in-upper-case"),
        pytest.param(f"sysecho.{NODE[:-1]}.echo.invoke", id="an-id-too-short"),
        pytest.param(f"sysecho.{NODE}0.echo.invoke", id="an-id-too-long"),
        pytest.param(f"sysecho.{NODE[:-1]}i.echo.invoke", id="a-letter-that-ulids-lack"),
        pytest.param(f"abcdefghi.{NODE}.echo.invoke", id="a-kind-of-nine"),
        pytest.param(f"1sys.{NODE}.echo.invoke", id="a-kind-that-begins-with-a-digit"),
        pytest.param(f"sys.{NODE}.abcdefghijklmnopqrs.get", id="a-capability-of-nineteen"),
        pytest.param(f"sys.{NODE}._cap.get", id="a-capability-that-begins-with-an-underscore"),
        pytest.param(f"sys.{NODE}.cap.subscribed1", id="a-verb-with-a-digit"),
        pytest.param(f"sys.{NODE}.cap.subscribers", id="a-verb-of-eleven"),
        pytest.param(f"sysecho.{NODE}.echo.invoke\n", id="a-line-feed-at-the-end"),
        pytest.param(f" sysecho.{NODE}.echo.invoke", id="a-space-in-front"),
        pytest.param(f"sysecho.{NODE}.\u0435cho.invoke", id="a-cyrillic-letter"),
        pytest.param("a" * 1_000_000, id="a-million-letters"),
        pytest.param(f"abcdefgh.{NODE}.abcdefghijklmnopqr.subscribes", id="65-characters"),
    ],
)
def test_what_is_not_a_name_is_none(text: str) -> None:
    assert parse(text) is None


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (NODE, True),
        ("0" * 26, True),
        ("z" * 26, True),
        ("", False),
        (NODE + "0", False),
        (NODE + "\n", False),
        (NODE.upper(), False),
        (NODE[:-1] + "i", False),
        (NODE[:-1] + "l", False),
        (NODE[:-1] + "o", False),
        (NODE[:-1] + "u", False),
        (NODE[:-1] + "\u0661", False),
    ],
)
def test_a_node_id_is_a_ulid_in_lower_case(text: str, is_one: bool) -> None:  # noqa: FBT001 - the expected answer
    assert is_node_id(text) is is_one
