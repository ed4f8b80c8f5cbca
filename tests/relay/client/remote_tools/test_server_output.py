"""What a server's process and the SDK write besides messages: redacted, and nothing of other connections."""

import asyncio
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from relay.client.remote_tools.redaction import redacted_log
from relay.client.remote_tools.servers import ATTEMPT, WireAttempt
from relay.remote_tools import Redaction, RemoteToolError, StdioServer, ToolRule
from tests.fakes.guarded import guarded, over_http, over_stdio
from tests.fakes.mcp_server import FakeMcpServer, HttpAnswer

SECRET = "abcdefghijklmnop"
SDK = logging.getLogger("mcp.client.stdio")


@pytest.mark.holds("SPEC-0004/3.4/redaction")
@pytest.mark.integration
async def test_a_programs_line_that_is_no_message_is_logged_redacted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with guarded(over_stdio(tmp_path / "calls"), rules=(ToolRule("*", deadline_s=0.3),)) as client:
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
async def test_a_list_in_the_midst_of_a_call_that_is_no_message_is_logged_redacted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    fake = FakeMcpServer(legacy=True)
    async with over_http(fake, rules=(ToolRule("*", idempotent=True),)) as client:
        await client.tools.list_tools()
        fake.next_answer = HttpAnswer(404)  # the session has ended, so that the tools are listed again
        fake.next_list = HttpAnswer(200, f"Bearer {SECRET}".encode())
        with pytest.raises(RemoteToolError):
            await client.tools.execute("echo", {"message": "a private message"})
    assert "Error parsing JSON response" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.holds("SPEC-0004/3.4/redaction")
@pytest.mark.integration
async def test_standard_error_is_passed_on_printable_and_redacted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with guarded(over_stdio(tmp_path / "calls")) as client:
        await client.tools.execute("echo", {"message": "ping"})
    shown = capfd.readouterr().err
    assert shown == "\\x1b[31m[redacted]\nAuthorization: [redacted]\n"


@pytest.mark.integration
async def test_a_flood_on_standard_error_is_read_and_cut(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; sys.stderr.write('x' * 1_000_000); sys.stderr.flush(); input()"
    async with guarded(StdioServer(sys.executable, ("-P", "-c", code))) as client:
        with pytest.raises(RemoteToolError):
            await client.tools.list_tools(deadline_s=20)
    lines = capfd.readouterr().err.splitlines()
    assert {len(line) <= 2100 for line in lines} == {True}


@pytest.mark.holds("SPEC-0004/3.4/redaction")
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
    server = StdioServer(sys.executable, ("-P", "-c", code, str(tmp_path / "text"), str(size)))
    async with guarded(server) as client:
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


NAMES = (
    "passphrase",
    "db_pwd",
    "credentials",
    "AWS_ACCESS_KEY_ID",
    "accessKey",
    "session-id",
    "sessionId",
    "apiKey",
)
JWT = "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl"


@pytest.mark.holds("SPEC-0004/3.4/redaction")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"password": "x", "name": "y"}, {"password": "[redacted]", "name": "y"}),
        ({"User-Token": {"a": 1}}, {"User-Token": "[redacted]"}),
        ({"a": [{"API_KEY": 1}]}, {"a": [{"API_KEY": "[redacted]"}]}),
        (dict.fromkeys(NAMES, "x"), dict.fromkeys(NAMES, "[redacted]")),
        ("postgres://app:p@ss:w0rd@db.example/x", "postgres://[redacted]@db.example/x"),
        ("redis://:hunter2@10.0.0.1:6379", "redis://[redacted]@10.0.0.1:6379"),
        ("host=db password=hunter2 user=app", "host=db [redacted] user=app"),
        ("Server=db;Pwd='a b';Database=x", "Server=db;[redacted];Database=x"),
        ("see https://a.example:8443/b?c=d@e", "see https://a.example:8443/b?c=d@e"),
        (f"see {JWT} here", "see [redacted] here"),
        ("Authorization: Bearer abcdefgh12345678", "Authorization: [redacted]"),
        ("-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY----- x", "[redacted] x"),
        ("ghp_abcdefghijklmnop1234", "[redacted]"),
        ({"n": 1, "f": 1.5, "t": True, "z": None}, {"n": 1, "f": 1.5, "t": True, "z": None}),
        ("\x1b[2J", "\\x1b[2J"),
        ({"\x1b": 1}, {"\\x1b": 1}),
        (object, "[redacted]"),
    ],
    ids=str,
)
def test_a_value_is_redacted_by_names_and_patterns(value: Any, expected: Any) -> None:
    assert Redaction().value(value) == expected


def test_the_operator_replaces_the_rules() -> None:
    rules = Redaction(keys=("colour",), patterns=(re.compile(r"\d{4}"),))
    assert rules.value({"Colour": "red", "password": "1234 5"}) == {
        "Colour": "[redacted]",
        "password": "[redacted] 5",
    }


def test_a_secret_at_the_cut_is_not_left_by_half() -> None:
    text = Redaction().text("x" * 90 + " " + JWT * 3, 100)
    assert "eyJ" not in text
    assert len(text) == 100


def test_a_deep_value_ends() -> None:
    value: Any = "secret"
    for _ in range(100):
        value = [value]
    assert "secret" not in str(Redaction().value(value))
