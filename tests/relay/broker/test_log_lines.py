import asyncio

import pytest

from relay.broker.log_lines import BrokerLines
from schemas.process.logs import make_logger
from tests.fakes.lines import LogLines
from tests.fakes.seconds import Seconds

EVENT = "the broker reports"
PROBE = "01hzx9k3m4p7q8r9s0t1v2w3xd"
OTHER = "01hzx9k3m4p7q8r9s0t1v2w3xy"


@pytest.fixture
def log() -> LogLines:
    return LogLines()


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def lines(log: LogLines, seconds: Seconds) -> BrokerLines:
    return BrokerLines(make_logger("relay", log), seconds, PROBE)


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


def refused(client: str, node_id: str) -> bytes:
    """Return the line about ``client``, which may not publish for that node."""
    subject = f"$devices.{node_id}.heartbeat"
    return f'[7] [ERR] 127.0.0.1:4 - mid:31 - "{client}" - Publish Violation - Subject "{subject}"\n'.encode()


async def test_what_is_no_fault_and_no_attack_is_no_warning(lines: BrokerLines, log: LogLines) -> None:
    await read(
        lines,
        b'[7] [WRN] User "CN=edge-relay" found in connect proto, but user required from cert\n',
        b'[7] [ERR] 127.0.0.1:4 - mid:30 - "" - unacceptable protocol version of 5\n',
        refused("edge-doctor-01hz", PROBE),
    )
    assert [(line["level"], line["event"]) for line in log.entries()] == [
        ("info", "a client tries MQTT 5, which the broker does not speak"),
        ("info", "the broker refuses what relay doctor tries, as it should"),
    ]
    assert lines.last() == ""


async def test_a_client_that_calls_itself_the_doctor_is_not_taken_for_it(
    lines: BrokerLines, log: LogLines
) -> None:
    await read(lines, refused("edge-doctor-01hz", OTHER), refused(refused("x", PROBE)[11:-1].decode(), OTHER))
    assert [line["level"] for line in log.entries(EVENT)] == ["error", "error"]


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
