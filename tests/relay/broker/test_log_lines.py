import asyncio

import pytest

from relay.broker.log_lines import BrokerLines
from schemas.process.logs import make_logger
from tests.fakes.lines import LogLines
from tests.fakes.seconds import Seconds

EVENT = "the broker reports"


@pytest.fixture
def log() -> LogLines:
    return LogLines()


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def lines(log: LogLines, seconds: Seconds) -> BrokerLines:
    return BrokerLines(make_logger("relay", log), seconds)


async def read(lines: BrokerLines, *pieces: bytes) -> None:
    stream = asyncio.StreamReader()
    for piece in pieces:
        stream.feed_data(piece)
    stream.feed_eof()
    await lines.read(stream)


async def test_warnings_and_errors_are_logged_and_notices_are_not(lines: BrokerLines, log: LogLines) -> None:
    await read(lines, b"[7] [INF] Starting\n[7] [WRN] a meta file is bro", b"ken\n[7] [ERR] no\n\npanic: x\n")
    assert [(line["level"], line["line"]) for line in log.entries(EVENT)] == [
        ("warning", "a meta file is broken"),
        ("error", "no"),
        ("error", "panic: x"),
    ]
    assert lines.last() == "a meta file is broken | no | panic: x"


async def test_what_a_stranger_has_put_into_a_line_is_escaped_and_cut(
    lines: BrokerLines, log: LogLines
) -> None:
    await read(lines, b"[7] [ERR] \x1b[31m\xff" + b"a" * 1_000_000 + b"\n[7] [WRN] next\n", b"[7] [ERR] end")
    hostile, after, last = [line["line"] for line in log.entries(EVENT)]
    assert hostile.startswith("\\x1b[31m\\ufffd")
    assert len(hostile) <= 400
    assert (after, last) == ("next", "end")


async def test_a_stranger_who_causes_errors_without_end_fills_no_disk(
    lines: BrokerLines, log: LogLines, seconds: Seconds
) -> None:
    await read(lines, b"[7] [ERR] TLS handshake error\n" * 10_000)
    assert len(log.entries(EVENT)) == 30
    seconds.now += 1
    await read(lines, b"[7] [ERR] later\n")
    last = log.entries(EVENT)[-1]
    assert (last["line"], last["left_out"]) == ("later", 9_970)
