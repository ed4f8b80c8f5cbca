import asyncio
import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.client.stdio_bridge.bridge import Output, input_chunks
from relay.client.stdio_bridge.messages import (
    MAX_LINE_BYTES,
    Message,
    MessageSplitter,
    header_value,
    read,
)
from relay.http.body_parser import MAX_BODY_BYTES

NEW = "2026-07-28"
META = {"io.modelcontextprotocol/protocolVersion": NEW}


def said(**members: object) -> Message:
    return read(json.dumps({"jsonrpc": "2.0", **members}).encode())


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
        b'{"jsonrpc":"2.0","id":null,"method":"ping"}',
        b'{"jsonrpc":"2.0","id":true,"method":"ping"}',
        b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}',
        b'{"jsonrpc":"2.0","id":null,"method":"notifications/initialized"}',
        b'{"jsonrpc":"1.0","method":"notifications/initialized"}',
        b'{"jsonrpc":"2.0","method":"notifications/initialized","params":[]}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_message_says_nothing_and_is_kept_as_it_is(raw: bytes) -> None:
    assert read(raw) == Message(raw)
    assert not read(raw).is_silent
    assert not read(raw).may_repeat


@pytest.mark.parametrize(
    "raw",
    [
        b'{"jsonrpc":"2.0","id":1,"method":7}',
        b'{"jsonrpc":"2.0","id":1,"method":7,"result":{}}',
        b'{"jsonrpc":"2.0","id":1,"method":"ping","params":null}',
        b'{"id":1,"method":"ping"}',
    ],
)
def test_of_a_malformed_request_its_id_is_read_so_that_it_is_answered(raw: bytes) -> None:
    assert read(raw) == Message(raw, id=1)


def test_a_request_without_an_id_expects_its_refusal() -> None:
    assert not said(method="tools/list").is_silent


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


BOUND_S = 30


@pytest.fixture
def pipe() -> Iterator[tuple[FileIO, FileIO]]:
    reading, writing = os.pipe()
    with FileIO(reading, "rb") as reader, FileIO(writing, "wb") as writer:
        yield reader, writer


def receive(reader: FileIO, size: int) -> bytes:
    received = b""
    while len(received) < size and (chunk := reader.read(size - len(received))):
        received += chunk
    return received


async def collected(descriptor: int) -> bytes:
    async with asyncio.timeout(BOUND_S):
        return b"".join([chunk async for chunk in input_chunks(descriptor)])


async def test_all_that_comes_through_a_pipe_is_read_in_order(pipe: tuple[FileIO, FileIO]) -> None:
    reader, writer = pipe
    sent = bytes(range(256)) * 4096  # far more than a pipe holds

    def send() -> None:
        rest = sent
        while rest:
            rest = rest[writer.write(rest) :]
        writer.close()

    received, _ = await asyncio.gather(collected(reader.fileno()), asyncio.to_thread(send))
    assert received == sent


async def test_a_file_is_read_to_its_end(tmp_path: Path) -> None:
    # What asyncio has for pipes refuses a file.
    file = tmp_path / "lines"
    file.write_bytes(b"one\ntwo")
    with file.open("rb") as opened:
        assert await collected(opened.fileno()) == b"one\ntwo"


async def test_an_input_that_cannot_be_read_is_at_its_end(pipe: tuple[FileIO, FileIO]) -> None:
    _, writer = pipe
    assert await collected(writer.fileno()) == b""


async def test_lines_come_out_whole_and_in_order_though_the_pipe_is_full(pipe: tuple[FileIO, FileIO]) -> None:
    reader, writer = pipe
    output = Output(writer.fileno())
    lines = [bytes([65 + number]) * 100_000 for number in range(5)]
    writes = [asyncio.create_task(output.write(line)) for line in lines]
    size = sum(len(line) + 1 for line in lines)
    received = await asyncio.wait_for(asyncio.to_thread(receive, reader, size), BOUND_S)
    assert received.splitlines() == lines
    await asyncio.wait_for(asyncio.gather(*writes), BOUND_S)


async def test_a_writer_that_is_cancelled_leaves_no_half_of_a_line(pipe: tuple[FileIO, FileIO]) -> None:
    reader, writer = pipe
    output = Output(writer.fileno())
    first = asyncio.create_task(output.write(b"A" * 200_000))
    await asyncio.to_thread(reader.read, 1)  # it is being written
    first.cancel()
    last = asyncio.create_task(output.write(b"B"))
    expected = b"A" * 199_999 + b"\nB\n"
    received = await asyncio.wait_for(asyncio.to_thread(receive, reader, len(expected)), BOUND_S)
    assert received == expected
    await asyncio.wait_for(last, BOUND_S)


async def test_a_closed_reader_is_an_error_of_the_writer(pipe: tuple[FileIO, FileIO]) -> None:
    reader, writer = pipe
    reader.close()
    with pytest.raises(BrokenPipeError):
        await asyncio.wait_for(Output(writer.fileno()).write(b"hello?"), BOUND_S)


@pytest.mark.integration
def test_a_stray_print_goes_elsewhere_once_the_output_is_claimed() -> None:
    program = (
        "import os, sys\n"
        "from relay.client.stdio_bridge.bridge import claim_output\n"
        "own = claim_output()\n"
        "print('a stray print', flush=True)\n"
        "os.write(own, b'{}\\n')\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=True, timeout=60)
    assert done.stdout == b"{}\n"
    assert done.stderr == b"a stray print\n"
