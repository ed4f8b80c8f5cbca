"""What a server's process and the SDK write besides messages: redacted, and nothing of other connections."""

import asyncio
import logging
import sys
from pathlib import Path

import pytest

from relay.client.remote_tools.http_client import ATTEMPT, WireAttempt
from relay.client.remote_tools.redaction import Redaction, redacted_log
from relay.remote_tools import RemoteToolError, StdioServer, ToolRule
from tests.fakes.guarded import guarded, over_http
from tests.fakes.mcp_server import FakeMcpServer, HttpAnswer

ROOT = Path(__file__).parents[3]
SECRET = "abcdefghijklmnop"
SDK = logging.getLogger("mcp.client.stdio")


def stdio(tmp_path: Path) -> StdioServer:
    command, *arguments = [sys.executable, "-P", "-m", "tests.fakes.mcp_server", str(tmp_path / "calls")]
    return StdioServer(command, tuple(arguments), {"PYTHONPATH": str(ROOT)})


@pytest.mark.integration
async def test_a_programs_line_that_is_no_message_is_logged_redacted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with guarded(stdio(tmp_path), rules=(ToolRule("*", deadline_s=0.3),)) as client:
        await client.tools.list_tools(deadline_s=20)
        with pytest.raises(RemoteToolError):
            await client.tools.execute("garbage")
    [record] = [record for record in caplog.records if record.name == "mcp.client.stdio"]
    assert record.getMessage().startswith("Failed to parse JSONRPC message from server: ")
    assert SECRET not in caplog.text


@pytest.mark.integration
async def test_an_answer_over_http_that_is_no_message_is_logged_redacted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    fake = FakeMcpServer()
    async with over_http(fake) as client:
        await client.tools.list_tools()
        fake.next_answer = HttpAnswer(200, f"Bearer {SECRET}".encode())
        with pytest.raises(RemoteToolError):
            await client.tools.execute("echo", {"message": "a private message"})
    assert "Error parsing JSON response" in caplog.text
    assert SECRET not in caplog.text
    assert "a private message" not in caplog.text


@pytest.mark.integration
async def test_standard_error_is_passed_on_printable_and_redacted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with guarded(stdio(tmp_path)) as client:
        await client.tools.execute("echo", {"message": "ping"})
    shown = capfd.readouterr().err
    assert shown == "\\x1b[31m[redacted]\nAuthorization: [redacted]\n"


@pytest.mark.integration
async def test_a_flood_on_standard_error_is_read_and_cut(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; sys.stderr.write('x' * 1_000_000); sys.stderr.flush(); input()"
    command, *arguments = [sys.executable, "-P", "-c", code]
    async with guarded(StdioServer(command, tuple(arguments))) as client:
        with pytest.raises(RemoteToolError):
            await client.tools.list_tools(deadline_s=20)
    lines = capfd.readouterr().err.splitlines()
    assert {len(line) <= 2100 for line in lines} == {True}


@pytest.mark.integration
@pytest.mark.parametrize("size", [1, 100, 8192], ids=lambda size: f"{size} bytes at once")
async def test_a_secret_that_arrives_in_pieces_is_redacted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], size: int
) -> None:
    lines = [f"Key{number:04}ofASecret" for number in range(30)]
    key = "\n".join(["-----BEGIN PRIVATE KEY-----", *lines, "-----END PRIVATE KEY-----"])
    # Over the end of a piece of 8 KiB: a key after other lines, and a token in a line that is too long.
    text = f"begins\n{'y' * 100}\n{key}\nbetween\n{'x' * 8180} Bearer {SECRET * 2000}\nends\n"
    (tmp_path / "text").write_text(f"{'z' * 79}\n" * 100 + text)
    code = (
        "import os, sys; text = open(sys.argv[1], 'rb').read(); size = int(sys.argv[2])\n"
        "for begin in range(0, len(text), size): os.write(2, text[begin:begin + size])"
    )
    command, *arguments = [sys.executable, "-P", "-c", code, str(tmp_path / "text"), str(size)]
    async with guarded(StdioServer(command, tuple(arguments))) as client:
        with pytest.raises(RemoteToolError):
            await client.tools.list_tools(deadline_s=20)
    shown = capfd.readouterr().err
    assert not any(line in shown for line in lines)
    assert SECRET not in shown
    others = [line for line in shown.splitlines() if not line.startswith(("z", "y", "x"))]
    assert others == ["begins", "[redacted]", "between", "ends"]


def test_a_record_of_another_user_of_the_sdk_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with redacted_log(Redaction()):
        SDK.warning("%s", f"Bearer {SECRET}")
    assert SECRET in caplog.text


async def test_a_record_has_the_type_of_its_exception_and_not_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def log() -> None:
        ATTEMPT.set(WireAttempt())
        try:
            int(SECRET)
        except ValueError:
            SDK.exception("%s \x1b", f"Bearer {SECRET}")
        SDK.info("session %s", SECRET)

    caplog.set_level(logging.DEBUG)
    with redacted_log(Redaction()):
        await asyncio.create_task(log())
    assert SECRET not in caplog.text
    assert [record.getMessage() for record in caplog.records] == ["[redacted] \\x1b: ValueError"]
    assert "in log" in caplog.text
