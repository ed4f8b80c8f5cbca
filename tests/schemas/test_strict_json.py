import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.strict_json import MAX_DEPTH, MAX_SAFE_INTEGER, StrictJsonError, loads

LIMIT = 1 << 20

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-MAX_SAFE_INTEGER, MAX_SAFE_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=12,
)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@given(VALUES, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_what_json_writes_is_read_back_the_same(
    value: Any,
    indent: int | str | None,
    escaped: bool,  # noqa: FBT001 - hypothesis
) -> None:
    read = loads(json.dumps(value, indent=indent, ensure_ascii=escaped).encode(), max_bytes=LIMIT)
    assert json.dumps(read) == json.dumps(value)


@given(VALUES)
def test_bytes_and_text_are_read_alike(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert loads(text, max_bytes=LIMIT) == loads(text.encode(), max_bytes=LIMIT)


@given(st.text(alphabet='[]{}",:\\u0dc9eE+-. \ntrufalsn\ud800é', max_size=60) | st.binary(max_size=40))
def test_any_input_is_either_refused_or_read_as_json_reads_it(data: str | bytes) -> None:
    try:
        value = loads(data, max_bytes=LIMIT)
    except StrictJsonError:
        return
    assert value == json.loads(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b'{"a":1,"a":1}', "a duplicate key in an object", id="a-key-twice"),
        pytest.param(b'{"a":1,"\\u0061":2}', "a duplicate key in an object", id="a-key-twice-once-escaped"),
        pytest.param(b'[{"b":{"a":1,"a":2}}]', "a duplicate key in an object", id="a-key-twice-inside"),
        pytest.param(b"NaN", "a number that is not finite", id="nan"),
        pytest.param(b'{"a":Infinity}', "a number that is not finite", id="infinity"),
        pytest.param(b"[-Infinity]", "a number that is not finite", id="minus-infinity"),
        pytest.param(b"1e400", "a number that is not finite", id="a-float-that-overflows"),
        pytest.param(b"9007199254740992", "an integer beyond 2^53-1", id="two-to-the-53"),
        pytest.param(b"-9007199254740992", "an integer beyond 2^53-1", id="minus-two-to-the-53"),
        pytest.param(b"1" * 100_000, "an integer beyond 2^53-1", id="an-integer-of-100000-digits"),
        pytest.param(b'"\\ud800"', "a lone surrogate", id="a-lone-high-surrogate"),
        pytest.param(b'"\\udc00\\ud800"', "a lone surrogate", id="surrogates-in-the-wrong-order"),
        pytest.param(b'{"\\udfff":1}', "a lone surrogate", id="a-lone-surrogate-in-a-key"),
        pytest.param('"\ud800"', "a lone surrogate", id="a-bare-surrogate-in-text"),
        pytest.param('"\ud83d\\ude00"', "a lone surrogate", id="a-pair-half-bare-half-escaped"),
        pytest.param(b'"\xff"', "not UTF-8", id="a-stray-byte"),
        pytest.param(b'"\xed\xa0\x80"', "not UTF-8", id="a-surrogate-in-utf-8"),
        pytest.param(b'"\xc0\xaf"', "not UTF-8", id="an-overlong-encoding"),
        pytest.param('"a"'.encode("utf-16"), "not UTF-8", id="utf-16"),
        pytest.param(b"\xef\xbb\xbf{}", "not JSON", id="a-byte-order-mark"),
        pytest.param(b"", "not JSON", id="nothing"),
        pytest.param(b"{} {}", "not JSON", id="two-documents"),
        pytest.param(b"{'a':1}", "not JSON", id="single-quotes"),
        pytest.param(b"[1,]", "not JSON", id="a-trailing-comma"),
        pytest.param(b'"a\nb"', "not JSON", id="a-bare-line-feed-in-a-string"),
        pytest.param(b"01", "not JSON", id="a-leading-zero"),
        pytest.param(b"{}//", "not JSON", id="a-comment"),
        pytest.param(nested(MAX_DEPTH + 1).encode(), "nested too deeply", id="arrays-33-deep"),
        pytest.param(b'{"a":' * 33 + b"1" + b"}" * 33, "nested too deeply", id="objects-33-deep"),
        pytest.param(b"[" * 100_000, "nested too deeply", id="arrays-100000-deep-and-open"),
        pytest.param(
            b"[" + b"[]," * 40 + nested(MAX_DEPTH).encode() + b"]",
            "nested too deeply",
            id="deep-after-shallow",
        ),
        pytest.param(b'["]",' * 40 + b"1" + b"]" * 40, "nested too deeply", id="closed-only-in-strings"),
        pytest.param(b'["\\"]",' * 40 + b"1" + b"]" * 40, "nested too deeply", id="closed-after-a-quote"),
    ],
)
def test_a_document_with_two_readings_is_refused(data: bytes | str, reason: str) -> None:
    with pytest.raises(StrictJsonError) as caught:
        loads(data, max_bytes=LIMIT)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("data", "value"),
    [
        pytest.param(b"9007199254740991", MAX_SAFE_INTEGER, id="the-largest-integer"),
        pytest.param(b"-9007199254740991", -MAX_SAFE_INTEGER, id="the-smallest-integer"),
        pytest.param(b'"\\ud83d\\ude00"', "\U0001f600", id="an-escaped-pair"),
        pytest.param(b'"\\\\ud800"', "\\ud800", id="an-escaped-backslash-before-a-u"),
        pytest.param(b' {"a" : [ ] }\n', {"a": []}, id="white-space"),
        pytest.param(b'{"a":{"a":1}}', {"a": {"a": 1}}, id="the-same-key-on-two-levels"),
        pytest.param(b'"' + b"[" * 100 + b'"', "[" * 100, id="brackets-in-a-string"),
        pytest.param(b'"\\"' + b"[" * 100 + b'"', '"' + "[" * 100, id="brackets-after-an-escaped-quote"),
        pytest.param(
            b"[" + b"[]," * 40 + nested(MAX_DEPTH - 1).encode() + b"]",
            [[]] * 40 + json.loads("[" + nested(MAX_DEPTH - 1) + "]"),
            id="the-depth-limit-after-many-brackets",
        ),
        pytest.param(b"[" + b"[]," * 99 + b"[]]", [[]] * 100, id="many-brackets-side-by-side"),
    ],
)
def test_an_unusual_document_with_one_reading_is_read(data: bytes, value: object) -> None:
    assert loads(data, max_bytes=LIMIT) == value


def test_integers_and_floats_keep_their_types() -> None:
    assert [type(item) for item in loads(b"[1,1.0,1e0,true]", max_bytes=LIMIT)] == [int, float, float, bool]


def test_the_depth_limit_itself_is_allowed() -> None:
    assert loads(nested(MAX_DEPTH), max_bytes=LIMIT) == json.loads(nested(MAX_DEPTH))


@pytest.mark.parametrize("data", [b'"1234"', '"1234"', '"\u20ac1"', '"\U0001f600"'], ids=ascii)
def test_the_size_limit_counts_bytes_and_is_itself_allowed(data: bytes | str) -> None:
    assert loads(data, max_bytes=6)
    with pytest.raises(StrictJsonError, match="larger than the limit"):
        loads(data, max_bytes=5)


def test_the_size_is_checked_before_anything_is_parsed() -> None:
    with pytest.raises(StrictJsonError, match="larger than the limit"):
        loads(b"\xff" * 11, max_bytes=10)


def test_a_string_of_escaped_quotes_that_never_ends_is_refused_in_linear_time() -> None:
    # In quadratic time this takes minutes, which the time limit of every test turns into a failure.
    hostile = b"[" * 40 + b'"' + b'\\"' * (LIMIT // 4)
    with pytest.raises(StrictJsonError, match="nested too deeply"):
        loads(hostile, max_bytes=LIMIT)


def test_a_refusal_names_no_cause_that_could_hold_the_input() -> None:
    with pytest.raises(StrictJsonError) as caught:
        loads(b'{"secret', max_bytes=LIMIT)
    assert caught.value.__suppress_context__
    assert "secret" not in str(caught.value)
