import base64
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.client.stdio_bridge.messages import (
    MAX_LINE_BYTES,
    Message,
    MessageSplitter,
    canonical_error,
    header_value,
    internal_error,
    list_changed,
    read,
)
from relay.http.body_parser import MAX_BODY_BYTES

NEW = "2026-07-28"
META = {"io.modelcontextprotocol/protocolVersion": NEW}


def said(**members: object) -> Message:
    return read(json.dumps({"jsonrpc": "2.0", **members}).encode())


def test_a_call_of_the_new_era_goes_with_what_http_mirrors() -> None:
    message = said(id=1, method="tools/call", params={"name": "a.b.c.d", "_meta": META})
    assert message.headers() == {
        "mcp-method": "tools/call",
        "mcp-name": "a.b.c.d",
        "mcp-protocol-version": NEW,
    }


@pytest.mark.parametrize(
    ("method", "params", "name"),
    [
        ("resources/read", {"uri": "fleet://nodes", "name": "x"}, "fleet://nodes"),
        ("prompts/get", {"name": "p"}, "p"),
        ("tools/list", {"name": "not mirrored"}, None),
        ("tools/call", {"name": 7}, None),
        ("tools/call", [1], None),
    ],
)
def test_only_a_name_that_the_method_is_about_is_mirrored(
    method: str, params: object, name: str | None
) -> None:
    assert said(id=1, method=method, params=params).name == name


@pytest.mark.parametrize(
    "text", ["tools/call\r\nx-evil: 1", "größe", " edge", "edge ", "", "=?base64?YQ==?="]
)
def test_what_no_header_can_hold_goes_in_base64_and_comes_back(text: str) -> None:
    value = header_value(text)
    assert value.isascii()
    assert value.isprintable()
    assert value.startswith("=?base64?")
    assert base64.b64decode(value.removeprefix("=?base64?").removesuffix("?=")).decode() == text


@given(st.text(st.characters(codec="utf-8")))
def test_no_text_makes_a_header_that_is_two(text: str) -> None:
    value = header_value(text)
    assert value.isascii()
    assert value.isprintable()
    assert value == value.strip()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"nonsense",
        b'{"id":1,"id":2,"method":"ping"}',
        b'{"id":1,"method":"ping","params":{"x":NaN}}',
        b'{"id":null,"method":"ping"}',
        b'{"id":true,"method":"ping"}',
        b'{"id":1.5,"method":"ping"}',
        b'{"id":1,"method":7}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_message_says_nothing_and_is_kept_as_it_is(raw: bytes) -> None:
    assert read(raw) == Message(raw)
    assert not read(raw).is_silent


def test_a_notification_and_an_answer_expect_no_answer() -> None:
    assert said(method="notifications/initialized").is_silent
    assert said(id=1, result={}).is_silent
    assert said(id=1, error={}).is_silent
    assert not said(id=1, method="ping").is_silent


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("tools/list", True),
        ("ping", True),
        ("initialize", True),
        ("server/discover", True),
        ("resources/read", True),
        ("subscriptions/listen", True),
        ("notifications/initialized", True),
        ("tools/call", False),
        ("completion/complete", False),
        ("what/ever", False),
    ],
)
def test_what_may_be_sent_twice_is_named(method: str, *, expected: bool) -> None:
    assert said(id=1, method=method).may_repeat is expected


def test_what_is_none_of_json_is_never_sent_twice() -> None:
    assert not read(b"nonsense").may_repeat


def test_errors_of_our_own_are_canonical() -> None:
    assert json.loads(internal_error("a", "Away.", retryable=True)) == {
        "jsonrpc": "2.0",
        "id": "a",
        "error": {
            "code": -32603,
            "message": "Away.",
            "data": {
                "canonical": "INTERNAL_ERROR",
                "httpStatus": 500,
                "message": "Away.",
                "retryable": True,
            },
        },
    }
    refusal = json.loads(canonical_error(None, "UNAUTHORIZED", "No."))
    assert (refusal["id"], refusal["error"]["code"]) == (None, -32001)
    assert refusal["error"]["data"]["retryable"] is False


def test_a_change_says_which_subscription_it_is_of() -> None:
    assert json.loads(list_changed()) == {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
    meta = json.loads(list_changed(7))["params"]["_meta"]
    assert meta == {"io.modelcontextprotocol/subscriptionId": 7}


def test_a_line_is_as_long_as_a_body_may_be() -> None:
    assert MAX_LINE_BYTES == MAX_BODY_BYTES


def cut(splitter: MessageSplitter, chunks: list[bytes]) -> Iterator[bytes | None]:
    for chunk in chunks:
        yield from splitter.feed(chunk)
    yield splitter.end()


@given(st.lists(st.binary(max_size=12)), st.integers(1, 8))
def test_however_the_bytes_come_the_lines_are_the_same(chunks: list[bytes], max_bytes: int) -> None:
    whole = b"".join(chunks).split(b"\n")
    expected = [line if len(line) <= max_bytes else None for line in whole]
    assert list(cut(MessageSplitter(max_bytes), chunks)) == expected


def test_of_a_line_that_is_too_long_nothing_is_kept() -> None:
    splitter = MessageSplitter(8)
    assert list(splitter.feed(b"123456789")) == []
    assert list(splitter.feed(b"x" * 1000)) == []
    assert not splitter._rest  # noqa: SLF001 - what it holds is the point
    assert list(splitter.feed(b"\nnext\n")) == [None, b"next"]
