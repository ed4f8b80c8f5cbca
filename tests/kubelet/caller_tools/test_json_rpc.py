import json
from typing import Any

import pytest

from kubelet.caller_tools import json_rpc
from kubelet.caller_tools.json_rpc import JsonRpcRequest, LineSplitter, RpcError, parse
from schemas.errors import Failure, ToolError


def line(**members: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": "m", **members}).encode()


@pytest.mark.parametrize("id_", [1, 0, -5, "a", "x" * 128])
def test_a_request_is_read(id_: int | str) -> None:
    assert parse(line(id=id_, params={"a": 1})) == JsonRpcRequest("m", {"a": 1}, id_)


def test_without_params_they_are_empty() -> None:
    assert parse(line()).params == {}


def test_without_an_id_it_is_a_notification() -> None:
    assert parse(b'{"jsonrpc":"2.0","method":"m"}').request_id is None


@pytest.mark.parametrize(
    ("data", "code", "id_"),
    [
        (b"{", json_rpc.PARSE_ERROR, None),
        (b"\xff\xfe", json_rpc.PARSE_ERROR, None),
        (b'{"a":1,"a":2}', json_rpc.PARSE_ERROR, None),
        (b'{"a":NaN}', json_rpc.PARSE_ERROR, None),
        (b"[" * 40 + b"]" * 40, json_rpc.PARSE_ERROR, None),
        (b"[]", json_rpc.INVALID_REQUEST, None),
        (b"1", json_rpc.INVALID_REQUEST, None),
        (None, json_rpc.INVALID_REQUEST, None),
        (line(id=None), json_rpc.INVALID_REQUEST, None),
        (line(id=True), json_rpc.INVALID_REQUEST, None),
        (line(id=1.5), json_rpc.INVALID_REQUEST, None),
        (line(id=""), json_rpc.INVALID_REQUEST, None),
        (line(id="x" * 129), json_rpc.INVALID_REQUEST, None),
        (line(id=7, jsonrpc="1.0"), json_rpc.INVALID_REQUEST, 7),
        (line(id=7, method=3), json_rpc.INVALID_REQUEST, 7),
        (line(id=7, params=[1]), json_rpc.INVALID_PARAMS, 7),
    ],
)
def test_what_is_no_request_is_rejected_with_its_code(data: bytes | None, code: int, id_: int | None) -> None:
    with pytest.raises(RpcError) as raised:
        parse(data)
    assert (raised.value.code, raised.value.request_id) == (code, id_)


def test_messages_are_one_line_of_ascii() -> None:
    sent = json_rpc.response(1, {"text": "ö\n\u2028"})
    assert sent.isascii()
    assert sent.count(b"\n") == 1
    assert json.loads(sent) == {"jsonrpc": "2.0", "id": 1, "result": {"text": "ö\n\u2028"}}


@pytest.mark.holds("CALLER-TOOLS/data/config-notification")
def test_a_notification_has_a_type_and_params() -> None:
    assert json.loads(json_rpc.notification("t", {"a": 1})) == {"type": "t", "params": {"a": 1}}


def test_a_failed_request_carries_the_error_envelope() -> None:
    error = json.loads(json_rpc.tool_error(4, ToolError(Failure.CALLER_TIMEOUT), None))["error"]
    assert error["code"] == -32003
    assert error["data"]["code"] == "E_DEADLINE_EXCEEDED"
    assert set(error["data"]) == {"code", "message", "suggested_fix"}


def test_a_callers_own_text_is_data_and_printable_in_the_message() -> None:
    answer = json_rpc.tool_error(4, ToolError(Failure.CALLER_TOOL_FAILED), "no\x1b[31m ö")
    error = json.loads(answer)["error"]
    assert error["message"] == "no\\x1b[31m \\xf6"
    assert error["data"]["caller_message"] == "no\x1b[31m ö"
    assert error["data"]["message"] == Failure.CALLER_TOOL_FAILED.value.message


def lines_of(*pieces: bytes, limit: int = 8) -> list[bytes | None]:
    splitter = LineSplitter(limit)
    return [line for piece in pieces for line in splitter.feed(piece)]


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"one\ntwo\n"], [b"one", b"two"]),
        ([b"o", b"n", b"e", b"\n"], [b"one"]),
        ([b"one\r\n"], [b"one"]),
        ([b"half"], []),
        ([b"\n\n"], [b"", b""]),
        ([b"12345678\n"], [b"12345678"]),
    ],
)
def test_pieces_are_cut_into_lines_wherever_they_were_cut(pieces: list[bytes], lines: list[bytes]) -> None:
    assert lines_of(*pieces) == lines


@pytest.mark.parametrize("pieces", [[b"123456789\nnext\n"], [b"12345", b"6789", b"0\nnext", b"\n"]])
def test_a_line_over_the_limit_is_reported_once_and_the_next_one_is_read(pieces: list[bytes]) -> None:
    assert lines_of(*pieces) == [None, b"next"]


def test_an_endless_line_is_reported_at_the_limit_and_does_not_grow_memory() -> None:
    splitter = LineSplitter(8)
    assert [line for _ in range(1000) for line in splitter.feed(b"12345")] == [None]
    assert len(splitter._held) == 0  # noqa: SLF001 - what a client could make grow


def test_lines_over_the_limit_one_after_the_other_are_each_reported() -> None:
    assert lines_of(b"123456789\n123456789\nok\n") == [None, None, b"ok"]
