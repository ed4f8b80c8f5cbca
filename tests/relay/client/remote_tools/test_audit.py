"""Records: what each holds, where they are written, and what happens when they cannot be."""

import asyncio
import json
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from relay.client.remote_tools.audit import CallAudit, Event, JsonLines, Recorded
from relay.client.remote_tools.contracts import PinsError
from relay.remote_tools import (
    AuditFailedError,
    AuditRecord,
    HttpServer,
    Redaction,
    RemoteToolError,
    ToolInvalidArguments,
    ToolTimeout,
    ToolUnauthorized,
)
from tests.fakes.guarded import guarded, over_http
from tests.fakes.mcp_server import FakeMcpServer
from tests.fakes.ports import unused_port

CALL = Recorded("01HZ", "echo", "read")
NOW_MS = 1_795_000_000_000


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("ascii").splitlines()]


@pytest.mark.integration
async def test_a_call_leaves_two_lines_in_a_private_file_and_a_refusal_one(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    async with over_http(FakeMcpServer(), audit=file) as client:
        await client.tools.execute("echo", {"message": "a message"})
        with pytest.raises(RemoteToolError):
            await client.tools.execute("echo", {"message": 5})
    started, ended, refused = lines_of(file)
    assert started["correlation_id"] == ended["correlation_id"] != refused["correlation_id"]
    assert {name: started[name] for name in ("event", "decision", "tool", "attempt", "risk")} == {
        "event": "started",
        "decision": "allowed",
        "tool": "echo",
        "attempt": 1,
        "risk": "admin",
    }
    assert (ended["outcome"], ended["duration_ms"] > 0) == ("ok", True)
    assert (refused["decision"], refused["reason"]) == ("refused", "arguments")
    assert refused["duration_ms"] > 0


def outcome_of(records: list[AuditRecord]) -> tuple[str, str, int, str]:
    [record] = records
    assert record["duration_ms"] >= 0
    return record["event"], record["decision"], record["attempt"], record["reason"]


@pytest.mark.integration
async def test_a_call_that_is_cancelled_while_its_contract_loads_is_recorded() -> None:
    async with over_http(FakeMcpServer(silent=True)) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.tools.execute("echo", {"message": "ping"})
        assert outcome_of(client.records) == ("ended", "allowed", 0, "cancelled")


@pytest.mark.integration
async def test_a_server_that_is_not_reached_has_refused_nothing() -> None:
    async with guarded(HttpServer(f"http://127.0.0.1:{unused_port()}/mcp")) as client:
        with pytest.raises(RemoteToolError):
            await client.tools.execute("echo", {"message": "ping"})
        assert outcome_of(client.records) == ("ended", "allowed", 0, "unreachable")


@pytest.mark.integration
async def test_a_call_that_is_blocked_by_a_damaged_file_of_pins_is_recorded(tmp_path: Path) -> None:
    pins = tmp_path / "pins.json"
    fake = FakeMcpServer()
    async with over_http(fake, pins=pins) as client:
        pins.write_text("{")
        pins.chmod(0o600)
        with pytest.raises(PinsError):
            await client.tools.execute("echo", {"message": "ping"})
        assert outcome_of(client.records) == ("refused", "refused", 0, "pin")
    assert fake.calls == []


@pytest.mark.integration
async def test_a_name_that_is_no_text_is_refused_and_recorded() -> None:
    name: Any = {"name": "echo"}
    async with over_http(FakeMcpServer()) as client:
        with pytest.raises(ToolUnauthorized):
            await client.tools.execute(name)
        assert outcome_of(client.records) == ("refused", "refused", 0, "allowlist")


@pytest.mark.integration
async def test_arguments_that_are_no_object_are_refused_and_recorded() -> None:
    arguments: Any = ["ping"]
    async with over_http(FakeMcpServer()) as client:
        with pytest.raises(ToolInvalidArguments, match="not an object"):
            await client.tools.execute("echo", arguments)
        assert outcome_of(client.records) == ("refused", "refused", 0, "arguments")


@pytest.mark.integration
async def test_a_deadline_of_nothing_does_not_wait() -> None:
    async with over_http(FakeMcpServer(silent=True)) as client:
        async with asyncio.timeout(10):
            with pytest.raises(ToolTimeout):
                await client.tools.execute("echo", {"message": "ping"}, deadline_s=0)
        assert outcome_of(client.records) == ("ended", "allowed", 0, "deadline")


@pytest.mark.integration
async def test_arguments_and_results_are_left_out_unless_the_operator_gives_rules(tmp_path: Path) -> None:
    for redaction in (None, Redaction()):
        file = tmp_path / str(redaction is None)
        async with over_http(FakeMcpServer(), audit=file, redaction=redaction) as client:
            await client.tools.execute("echo", {"message": "Bearer abcdefgh12345678"})
        started, ended = lines_of(file)
        if redaction is None:
            assert not {"arguments", "result"} & {*started, *ended}
        else:
            assert started["arguments"] == ended["result"] == {"message": "[redacted]"}


def test_the_file_is_private_and_grows_by_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    for _ in range(2):
        CallAudit(JsonLines(file, time.monotonic), None, lambda: NOW_MS).started(CALL, 1, {})
    assert len(lines_of(file)) == 2
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_that_was_rotated_is_replaced_within_a_second(tmp_path: Path) -> None:
    file, old = tmp_path / "calls.jsonl", tmp_path / "calls.1"
    sink = JsonLines(file, count(0, 2).__next__)
    audit = CallAudit(sink, None, lambda: NOW_MS)
    audit.started(CALL, 1, {})
    file.rename(old)
    audit.ended(CALL, 1, 0.5)
    assert [lines_of(path)[0]["event"] for path in (old, file)] == ["started", "ended"]
    file.rename(tmp_path / "calls.2")
    file.write_text("")
    audit.started(CALL, 2, {})
    sink.close()
    audit.ended(CALL, 2, 0.5)
    sink.close()
    assert [line["attempt"] for line in lines_of(file)] == [2, 2]


@pytest.mark.parametrize("event", ["refused", "started", "ended"])
def test_a_record_that_cannot_be_written_is_an_error(event: str) -> None:
    def sink(_: AuditRecord) -> None:
        raise ZeroDivisionError

    audit = CallAudit(sink, None, lambda: NOW_MS)
    with pytest.raises(AuditFailedError, match=event):
        {
            "refused": lambda: audit.refused(CALL, 0.5, "risk", {}),
            "started": lambda: audit.started(CALL, 1, {}),
            "ended": lambda: audit.ended(CALL, 1, 0.5),
        }[event]()


def test_a_link_in_the_place_of_the_file_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "other")
    with pytest.raises(AuditFailedError):
        CallAudit(JsonLines(tmp_path / "link", time.monotonic), None, lambda: NOW_MS).started(CALL, 1, {})
    assert not (tmp_path / "other").exists()


def test_a_large_value_is_replaced_and_a_hostile_name_is_printable() -> None:
    records: list[AuditRecord] = []
    audit = CallAudit(records.append, Redaction(), lambda: NOW_MS)
    audit.started(Recorded("01HZ", "\x1b[2J"), 1, {"a": ["x" * 100] * 1000})
    assert records == [
        {
            "time_ms": NOW_MS,
            "event": Event.STARTED,
            "decision": "allowed",
            "correlation_id": "01HZ",
            "tool": "\\x1b[2J",
            "attempt": 1,
            "arguments": "[more than 16384 bytes]",
        }
    ]
