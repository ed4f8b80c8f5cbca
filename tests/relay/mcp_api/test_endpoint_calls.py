"""Calls by clients of both eras."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from mcp_types import TextContent
from typer.testing import CliRunner

from relay.cli.audit import app
from relay.remote_tools import BearerToken, HttpServer, Permissions, RemoteTools, Risk
from schemas.errors import Failure
from schemas.projection import META_CORRELATION_ID, META_ERROR, META_HOP
from schemas.times import iso
from tests.fakes.hub import Hub
from tests.fakes.mcp_stage import ECHO_NAME, ERAS, METRICS_NAME, PING, Era, Stage
from tests.fakes.routers import ScriptedRouter, SilentRouter, refusing
from tests.fakes.serving import Server
from tests.fakes.signer import NODE_ID, NOW_MS

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("query", ["", "?names=dashed"])
@pytest.mark.parametrize("name", [ECHO_NAME, ECHO_NAME.replace(".", "-")], ids=["dotted", "dashed"])
async def test_both_forms_of_a_name_can_be_called_always(
    stage: Stage, router: ScriptedRouter, era: Era, query: str, name: str
) -> None:
    async with stage.client(era, query=query) as client:
        result = await client.call_tool(name, PING)
    assert not result.is_error
    (content,) = result.content
    assert isinstance(content, TextContent)
    assert result.structured_content == {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}
    assert json.loads(content.text) == {**result.structured_content, "received_at": iso(NOW_MS)}
    assert router.commands[0].tool == ECHO_NAME


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("given", [None, "order-17"], ids=["without", "with an id of the caller"])
async def test_a_success_names_its_lines_in_the_audit_in_meta_alone(
    stage: Stage, era: Era, given: str | None
) -> None:
    async with stage.wire(era) as wire:
        wire.headers |= {} if given is None else {"x-correlation-id": given}
        result = await wire.result("tools/call", {"name": ECHO_NAME, "arguments": PING})
    recorded = {(line["correlation_id"], line.get("caller_correlation_id")) for line in stage.hub.audited()}
    assert recorded == {(result["_meta"][META_CORRELATION_ID], given)}
    assert result["structuredContent"].keys() == {"message", "received_at_ms", "node_id"}


@pytest.mark.holds("SPEC-0004/2.1/correlation")
@pytest.mark.parametrize("era", ["legacy", "auto"])
async def test_the_audits_of_a_guarded_client_and_of_the_relay_are_joined_by_one_command(
    stage: Stage, tmp_path: Path, era: str
) -> None:
    records = tmp_path / "edge-remote-tools" / "calls.jsonl"
    records.parent.mkdir()
    server = HttpServer(f"http://{stage.address}/mcp", BearerToken(stage.hub.token()))
    permissions = Permissions(allow=("*",), max_risk=Risk.ADMIN, scopes=None)
    async with RemoteTools(server, audit=records, permissions=permissions, mode=era) as tools:
        await tools.execute(ECHO_NAME, PING, correlation_id="order-16")
        result = await tools.execute(ECHO_NAME, PING, correlation_id="order-17")
    stage.hub.audit.flush()
    own = {"XDG_STATE_HOME": str(tmp_path)}
    for wanted in ("order-17", result.remote_correlation_id):
        command = [
            "grep",
            "--correlation",
            str(wanted),
            "--json",
            "--state-dir",
            str(stage.hub.audit_file.parent),
        ]
        done = CliRunner().invoke(app, command, env=own)
        assert done.exit_code == 0, done.output
        found = [json.loads(line) for line in done.output.splitlines()]
        events = [line.get("event") or line.get("decision") or line["outcome"] for line in found]
        assert sorted(events) == ["allow", "ended", "ok", "started"]
        assert {line["correlation_id"] for line in found} == {"order-17", result.remote_correlation_id}
        (trace,) = {line["traceparent"] for line in found if "traceparent" in line}
        assert trace.startswith("00-")


@pytest.mark.parametrize("era", ERAS)
async def test_an_error_is_a_result_whose_envelope_stands_in_text_and_meta_and_nowhere_else(
    stage: Stage, router: ScriptedRouter, era: Era
) -> None:
    router.answer = refusing(Failure.NODE_OFFLINE)
    async with stage.wire(era) as wire:
        result = await wire.result("tools/call", {"name": ECHO_NAME, "arguments": PING})
    assert result["isError"] is True
    (content,) = result["content"]
    envelope = json.loads(content["text"])
    assert (result["_meta"][META_ERROR], result["_meta"][META_HOP]) == (envelope, "session")
    assert envelope["code"] == "E_NODE_OFFLINE"
    assert stage.hub.registry.load("error@1.0.0").is_valid(envelope)
    assert "structuredContent" not in result


@pytest.mark.parametrize("era", ERAS)
async def test_the_official_client_takes_an_error_as_one(stage: Stage, era: Era) -> None:
    async with stage.client(era) as client:
        await client.list_tools()
        result = await client.call_tool(ECHO_NAME, {"message": 1})
    assert result.is_error
    assert result.structured_content is None
    assert result.meta is not None
    assert result.meta[META_ERROR]["code"] == "E_MANIFEST_INVALID"


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, id="none"),
        pytest.param({"arguments": None}, id="null"),
        pytest.param({"arguments": {}}, id="empty"),
    ],
)
async def test_no_arguments_are_empty_arguments(
    stage: Stage, router: ScriptedRouter, era: Era, params: dict[str, Any]
) -> None:
    sample = {"ts_ms": NOW_MS, "node_id": NODE_ID, "uptime_s": 1}
    router.answer = lambda _: {"ok": True, "result": sample}
    async with stage.wire(era) as wire:
        result = await wire.result("tools/call", {"name": METRICS_NAME, **params})
    assert result["structuredContent"] == sample
    assert router.commands[0].arguments == {}


@pytest.mark.parametrize("era", ERAS)
async def test_when_the_agent_gives_up_the_node_is_not_waited_for(hub: Hub, server: Server, era: Era) -> None:
    hub.connect(hub.ca.issue())
    router = SilentRouter()
    async with Stage(hub, router, server).running() as stage, stage.client(era) as client:
        calling = asyncio.create_task(client.call_tool(ECHO_NAME, PING))
        await router.asked.wait()
        calling.cancel()
        await router.given_up.wait()
        with pytest.raises(asyncio.CancelledError):
            await calling
    assert [line["code"] for line in hub.audited()] == ["ok", "cancelled"]
