import json
from typing import Any

import pytest
import rfc8785
from hypothesis import example, given
from hypothesis import strategies as st

from schemas.canonical import blake3_hex, is_canonical, jcs
from schemas.strict_json import MAX_SAFE_INTEGER, loads

# Beyond 2^53 the canonical form of a float is a row of digits, which strict JSON refuses as an integer.
NUMBERS = st.integers(-MAX_SAFE_INTEGER, MAX_SAFE_INTEGER) | st.floats(-(2.0**53) + 1, 2.0**53 - 1)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=12,
)


@given(VALUES)
def test_the_canonical_form_means_the_same_and_is_its_own_canonical_form(value: Any) -> None:
    canonical = jcs(value)
    parsed = loads(canonical, max_bytes=1 << 20)
    assert parsed == value
    assert jcs(parsed) == canonical


ODD_KEYS = st.dictionaries(st.text(max_size=2) | st.integers(0, 3), st.booleans(), max_size=3)
ODD = st.floats() | st.integers() | st.text(st.characters(), max_size=3) | st.binary(max_size=2) | ODD_KEYS


@given(VALUES | st.lists(VALUES | ODD, max_size=5))
@example([1e-4, 9.999e-5, 1e15 + 0.5, 1e16, 1.0, -0.0, 2**53 - 1, True])
@example([0.1, -0.5, 4503599627370495.5, float("inf")])
@example([("a", {"b": 2**53})])
def test_the_canonical_form_is_that_of_the_library(value: Any) -> None:
    try:
        expected = rfc8785.dumps(value)
    except ValueError:
        with pytest.raises(ValueError, match="no canonical form"):
            jcs(value)
    else:
        assert jcs(value) == expected


def test_what_contains_itself_has_no_canonical_form() -> None:
    value: list[object] = [1]
    value.append(value)
    with pytest.raises(ValueError, match="no canonical form"):
        jcs(value)


@given(VALUES, st.booleans(), st.booleans(), st.sampled_from([(",", ":"), (", ", ": ")]))
def test_bytes_are_canonical_exactly_when_they_are_the_canonical_form(
    value: Any,
    sort_keys: bool,  # noqa: FBT001 - hypothesis chooses it
    ensure_ascii: bool,  # noqa: FBT001 - as above
    separators: tuple[str, str],
) -> None:
    other = json.dumps(value, sort_keys=sort_keys, ensure_ascii=ensure_ascii, separators=separators)
    for data in (jcs(value), other.encode("utf-8")):
        assert is_canonical(data, value) is (jcs(value) == data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b'{"b":1,"a":2}', id="order"),
        pytest.param(b'{"a": 1}', id="space"),
        pytest.param(b'{"a":1.0}', id="a-whole-number-as-a-fraction"),
        pytest.param(b'{"a":1e-07}', id="an-exponent-with-a-zero"),
        pytest.param(b'{"a":"\\u0041"}', id="a-letter-escaped"),
        pytest.param(b'{"a":"\\u00e9"}', id="another-alphabet-escaped"),
        pytest.param(b'{"a":"\\/"}', id="a-slash-escaped"),
        pytest.param(b'{"a":-0}', id="minus-zero"),
        pytest.param(b'{"a":1}\n', id="a-newline-behind"),
    ],
)
def test_another_spelling_of_the_same_value_is_not_canonical(data: bytes) -> None:
    assert not is_canonical(data, loads(data, max_bytes=100))


@given(st.dictionaries(st.text(max_size=8), st.integers(0, 9), max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_members_makes_no_difference(value: dict[str, int], random: Any) -> None:
    shuffled = list(value.items())
    random.shuffle(shuffled)
    assert jcs(dict(shuffled)) == jcs(value)


def test_the_example_of_rfc_8785_section_3_2() -> None:
    value = json.loads(
        r"""{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
            "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false]}"""
    )
    assert jcs(value).decode() == (
        '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        '"string":"\u20ac$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    )


def test_members_are_ordered_by_utf_16_code_units() -> None:
    keys = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6"]
    in_order = json.loads(jcs(dict.fromkeys(keys, 0)))
    assert list(in_order) == ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        pytest.param(1.0, b"1", id="a-whole-float"),
        pytest.param(-0.0, b"0", id="minus-zero"),
        pytest.param(0.5, b"0.5", id="a-fraction"),
        pytest.param(1e21, b"1e+21", id="the-first-exponent"),
        pytest.param(1e-7, b"1e-7", id="a-small-number"),
        pytest.param(5e-324, b"5e-324", id="the-smallest-number"),
        pytest.param(MAX_SAFE_INTEGER, b"9007199254740991", id="the-largest-integer"),
    ],
)
def test_numbers_are_written_as_ecmascript_writes_them(number: float, text: bytes) -> None:
    assert jcs(number) == text


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(float("nan"), id="nan"),
        pytest.param([float("inf")], id="infinity"),
        pytest.param(2**53, id="an-integer-beyond-2-to-the-53"),
        pytest.param("\ud800", id="a-lone-surrogate"),
        pytest.param({"\ud800": 1}, id="a-lone-surrogate-in-a-key"),
        pytest.param({1: 2}, id="a-key-that-is-no-string"),
        pytest.param(b"bytes", id="a-value-that-is-not-json"),
    ],
)
def test_a_value_without_a_canonical_form_is_a_value_error(value: object) -> None:
    with pytest.raises(ValueError, match="no canonical form"):
        jcs(value)


@pytest.mark.parametrize(
    ("data", "digest"),
    [
        pytest.param(b"", "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262", id="empty"),
        pytest.param(b"abc", "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85", id="abc"),
    ],
)
def test_the_hash_is_blake3_of_256_bits_in_hex(data: bytes, digest: str) -> None:
    assert blake3_hex(data) == digest
