"""What holds of the parsers for every input, and not only for chosen examples."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schemas import projection, topics
from schemas.addresses import (
    AddressError,
    BrokerAddress,
    HostPort,
    is_loopback,
    normal_url,
    parse_broker,
    parse_host_port,
)
from schemas.frames import FRAME_TYPES, MAX_FRAME_BYTES, FrameError, FrameReader
from schemas.keys import base64url, from_base64url
from schemas.projection import NODE_ID_PATTERN, ToolName, is_node_id
from schemas.registry import SchemaRegistry
from schemas.strict_json import MAX_SAFE_INTEGER, StrictJsonError, loads
from schemas.tokens import AGENT_REF, TokenError, TokenVerifier, sign_token
from tests.fakes.frames import message
from tests.fakes.hostile_texts import is_clean, strings_in
from tests.fakes.signer import NOW_MS, key_named

LIMIT = 1 << 20
KEY = key_named("a key that the verifier holds")
KID = "ab" * 32
TEXTS = st.text(max_size=20)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-MAX_SAFE_INTEGER, MAX_SAFE_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=10,
)
ANY_TEXT = st.text(alphabet=st.characters(), max_size=80)
NAMES = st.builds(
    ToolName,
    st.from_regex(r"[a-z][a-z0-9_]{0,7}", fullmatch=True),
    st.from_regex(NODE_ID_PATTERN, fullmatch=True),
    st.from_regex(r"[a-z][a-z0-9_]{0,17}", fullmatch=True),
    st.from_regex(r"[a-z]{1,9}", fullmatch=True),
)


@pytest.fixture(scope="module")
def verifier(registry: SchemaRegistry) -> TokenVerifier:
    return TokenVerifier(registry, AGENT_REF)


# --- JSON -----------------------------------------------------------------------------------------------


@given(VALUES, st.integers(0, 200), st.integers(0, 200), st.binary(max_size=3))
def test_a_document_that_was_tampered_with_has_one_reading_or_none(
    value: Any, start: int, length: int, put: bytes
) -> None:
    good = json.dumps(value).encode()
    data = good[:start] + put + good[start + length :]
    try:
        read = loads(data, max_bytes=LIMIT)
    except StrictJsonError:
        return
    assert read == json.loads(data)
    assert all(abs(number) <= MAX_SAFE_INTEGER for number in numbers_in(read, int))
    assert all(math.isfinite(number) for number in numbers_in(read, float))
    "".join(strings_in(read)).encode("utf-8")


def numbers_in(value: Any, kind: type) -> list[Any]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers_in(item, kind)]
    if isinstance(value, list):
        return [number for item in value for number in numbers_in(item, kind)]
    return [value] if type(value) is kind else []


# --- frames -------------------------------------------------------------------------------------------


@given(
    st.sampled_from(FRAME_TYPES), st.sampled_from(["type", "msg_id", "in_reply_to", "payload", "x"]), VALUES
)
def test_a_frame_with_another_member_is_read_as_such_or_refused(
    reader: FrameReader, type_: str, member: str, value: Any
) -> None:
    changed = message(type_) | {member: value}
    try:
        frame = reader.read(json.dumps(changed), MAX_FRAME_BYTES)
    except FrameError:
        return
    assert (frame.type, frame.msg_id, frame.payload) == (
        changed["type"],
        changed["msg_id"],
        changed["payload"],
    )
    assert frame.in_reply_to == changed.get("in_reply_to")


# --- tokens -------------------------------------------------------------------------------------------


def claims(**members: Any) -> dict[str, Any]:
    now_s = NOW_MS // 1000
    good = {
        "iss": "https://relay.example",
        "aud": "https://relay.example/mcp",
        "sub": "agent-1",
        "tenant": "acme",
        "scope": "tools:call:read_only",
        "iat": now_s,
        "exp": now_s + 60,
        "jti": "jti-1",
        "token_class": "agent_runtime",
    }
    return good | members


def verify(verifier: TokenVerifier, token: str) -> dict[str, Any]:
    keys = {KID: bytes(KEY.verify_key)}
    return verifier.verify(
        token, keys.get, audiences=frozenset({"https://relay.example/mcp"}), now_s=NOW_MS // 1000
    )


@given(st.sampled_from([*claims(), "nbf", "x"]), VALUES)
def test_a_signed_token_says_what_was_signed_or_nothing(
    verifier: TokenVerifier, name: str, value: Any
) -> None:
    stated = claims(**{name: value})
    try:
        read = verify(verifier, sign_token(KEY, KID, stated))
    except TokenError:
        return
    assert read == stated


@given(st.integers(0, 600), st.characters())
def test_a_token_with_one_character_changed_is_no_token(
    verifier: TokenVerifier, position: int, put: str
) -> None:
    good = sign_token(KEY, KID, claims())
    assert verify(verifier, good) == claims()
    changed = good[: position % len(good)] + put + good[position % len(good) + 1 :]
    assume(changed != good)
    with pytest.raises(TokenError) as caught:
        verify(verifier, changed)
    assert caught.value.reason in {"malformed", "unknown_key", "signature"}


@given(st.text("AQgw_-=+/ \n", max_size=8) | ANY_TEXT)
def test_another_spelling_is_refused(text: str) -> None:
    try:
        data = from_base64url(text)
    except ValueError:
        return
    assert base64url(data) == text


# --- names and topics ---------------------------------------------------------------------------------


@given(NAMES, st.integers(0, 64), st.characters() | st.just(""), st.booleans())
def test_what_is_nearly_a_name_is_another_name_or_none(
    name: ToolName,
    position: int,
    put: str,
    dashed: bool,  # noqa: FBT001 - hypothesis
) -> None:
    text = name.alias if dashed else name.canonical
    changed = text[:position] + put + text[position + 1 :]
    parsed = projection.parse(changed)
    if parsed is not None:
        assert changed in {parsed.canonical, parsed.alias}
        assert is_clean(changed)


@given(ANY_TEXT | st.lists(st.sampled_from(["$devices", "+", "#", "", "announce", "0" * 26]), max_size=5))
def test_a_topic_names_a_node_or_none(text: str | list[str]) -> None:
    topic = text if isinstance(text, str) else "/".join(text)
    parsed = topics.parse(topic)
    if parsed is not None:
        node_id, channel = parsed
        assert is_node_id(node_id)
        assert topic == f"$devices/{node_id}/{channel}"
        assert "/" not in channel


# --- addresses ----------------------------------------------------------------------------------------

HOSTS = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z0-9]{1,8}){0,2}", fullmatch=True) | (
    st.ip_addresses().map(lambda address: f"[{address}]" if address.version == 6 else str(address))
)
PORTS = st.integers(1, 65535)


@given(HOSTS, PORTS, st.booleans())
def test_an_address_is_read_as_it_is_written(host: str, port: int, tls: bool) -> None:  # noqa: FBT001 - hypothesis
    address = BrokerAddress(host.strip("[]"), port, tls)
    assert parse_broker(str(address)) == address
    assert str(parse_host_port(f"{host}:{port}")) == str(HostPort(host.strip("[]"), port))


@given(HOSTS, PORTS, st.sampled_from(["http", "https", "ws", "wss"]), st.sampled_from(["", "/"]))
def test_a_relays_url_has_one_normal_form(host: str, port: int, scheme: str, slash: str) -> None:
    assume("%" not in host)
    normal = normal_url(f"{scheme}://{host}:{port}{slash}")
    assert normal_url(normal) == normal
    assert normal_url(normal.replace("http", "ws", 1)) == normal
    assert normal_url(normal.upper().replace("HTTP", "http", 1).replace("S://", "s://", 1)) == normal


@given(st.text("htpsmqw:/.[]@#?%\\ \x00\n0aA-_\u0661\uff11", max_size=30) | ANY_TEXT)
def test_any_other_text_is_an_address_or_is_refused(text: str) -> None:
    for parse in (parse_host_port, parse_broker, normal_url):
        try:
            parsed = parse(text)
        except AddressError:
            continue
        assert is_clean(str(parsed))
        assert not isinstance(parsed, BrokerAddress) or isinstance(is_loopback(parsed.host), bool)


@pytest.mark.parametrize("parse", [parse_host_port, parse_broker])
def test_a_port_of_5000_digits_is_no_port(parse: Callable[[str], object]) -> None:
    with pytest.raises(AddressError):
        parse("mqtt.example:" + "9" * 5000)


@pytest.mark.parametrize(
    "zone", ["\x1b[31m", "eth0\nforged", "\u202e", "\udc9f", "]:80", "a b", '"'], ids=ascii
)
@pytest.mark.parametrize("parse", [parse_host_port, parse_broker])
def test_a_zone_of_any_text_is_no_address(parse: Callable[[str], object], zone: str) -> None:
    with pytest.raises(AddressError):
        parse(f"[fe80::1%{zone}]:1883")
