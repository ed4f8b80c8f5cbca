import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kubelet.caller_tools.socket_file import SocketFileError
from kubelet.config import DaemonPlan, NodeConfig, last_issued_file
from kubelet.daemon.composition import run_daemon
from kubelet.handlers.system_echo import EchoHandler
from kubelet.identity.provisioning import create_identity
from schemas.addresses import BrokerAddress
from schemas.canonical import jcs
from schemas.frames import SUBPROTOCOLS, FrameReader
from schemas.identity_files import IdentityFiles
from schemas.session import CloseCode
from tests.fakes.caller_tools import ANT, connected
from tests.fakes.daemon import BOUND_S, NO_BROKER, NO_RELAY, daemon
from tests.fakes.lines import LogLines
from tests.fakes.node import write_identity
from tests.fakes.played_relay import PlayedRelay
from tests.fakes.signer import NODE_ID, NOW_MS, SimulatedNode


@pytest.fixture
def state_dir(tmp_path: Path, node_of_today: SimulatedNode) -> Path:
    return write_identity(tmp_path / "state", node_of_today).root


@pytest.mark.integration
async def test_a_daemon_without_broker_and_relay_lives_and_says_what_is_missing(
    state_dir: Path, log: LogLines
) -> None:
    async with daemon(state_dir, log) as running:
        await log.until("broker not reached")
        await log.until("relay not reached")
        assert await running.get("/healthz") == (200, {"status": "ok"})
        status, page = await running.get("/readyz")
        assert (status, page["ready"]) == (503, False)
        assert {name: (now["ready"], now["state"]) for name, now in page["subsystems"].items()} == {
            "identity": (True, "issued"),
            "manifest": (True, "signed"),
            "broker": (False, "connecting"),
            "relay": (False, "connecting"),
            "calls": (False, "no session"),
            "caller tools": (True, "0 sessions, 0 local clients"),
        }
        assert all(now["live"] for now in page["subsystems"].values())
        assert [name for name, now in page["subsystems"].items() if not now["started"]] == ["calls"]
        # Signed, but neither the broker nor the relay has accepted it.
        assert await running.get("/.well-known/mcp.json") == (
            404,
            {"error": "no manifest has been published yet"},
        )
        assert not running.task.done()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", running.port), timeout=BOUND_S)


async def test_a_daemon_is_ready_when_the_relay_has_taken_its_manifest(
    state_dir: Path, log: LogLines, broker: BrokerAddress, relay: PlayedRelay
) -> None:
    async with daemon(state_dir, log, broker, relay.url) as running:
        end = await relay.next()
        await end.admit()
        status, _ = await running.until_relay_is("open")
        assert status == 503
        announce = await end.accept()
        await log.until("broker connected")
        status, page = await running.until_relay_is("announced")
        assert (status, page["ready"], page["subsystems"]["broker"]["ready"]) == (200, True, True)
        assert await running.get("/.well-known/mcp.json") == (200, json.loads(jcs(announce.payload)))
        answer = await end.command(tool=f"sys.{NODE_ID}.sysmetrics.snapshot", arguments={"include": ["mem"]})
        assert answer.payload["result"]["mem"]["total_bytes"] > 0
        assert int(last_issued_file(state_dir).read_text()) >= announce.payload["issued_at_ms"]


@pytest.mark.integration
async def test_a_daemon_is_ready_only_when_it_has_answered_the_relays_echo(
    state_dir: Path, log: LogLines, reader: FrameReader
) -> None:
    echo: dict[str, Any] = {"tool": f"sysecho.{NODE_ID}.echo.invoke", "arguments": {"message": "echo"}}
    relay = PlayedRelay(reader, subprotocols=SUBPROTOCOLS)
    async with relay.running(), daemon(state_dir, log, relay_url=relay.url) as running:
        for _ in range(2):  # one echo for each welcome
            end = await relay.next()
            await end.admit()
            await end.accept()
            status, page = await running.until_relay_is("announced")
            assert (status, page["subsystems"]["calls"]["state"]) == (503, "no command answered yet")
            refused = await end.command(**{**echo, "tool": f"sysecho.{NODE_ID}.echo.other"})
            assert refused.payload["ok"] is False
            assert (await running.get("/readyz"))[0] == 503
            assert (await end.command(**echo)).payload["ok"] is True
            status, page = await running.until_ready()
            assert (status, page["subsystems"]["calls"]["state"]) == (200, "calls flow")
            end.drop()
            await running.until_relay_is("connecting")


@pytest.mark.integration
async def test_a_daemon_that_is_stopped_answers_what_runs_refuses_what_is_new_and_says_goodbye(
    state_dir: Path, log: LogLines, relay: PlayedRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, release = asyncio.Event(), asyncio.Event()

    async def held(_handler: EchoHandler, _verb: str, _arguments: Mapping[str, Any]) -> dict[str, Any]:
        began.set()
        await release.wait()
        return {"message": "answered"}

    monkeypatch.setattr(EchoHandler, "invoke", held)
    echo: dict[str, Any] = {"tool": f"sysecho.{NODE_ID}.echo.invoke", "arguments": {"message": "echo"}}
    async with daemon(state_dir, log, relay_url=relay.url) as running:
        end = await relay.next()
        await end.admit()
        await end.accept()
        running_id = await end.send("cmd", deadline_ms=5000, **echo)
        await asyncio.wait_for(began.wait(), BOUND_S)
        running.task.cancel()
        refused = await end.command(tool=f"sys.{NODE_ID}.sysmetrics.snapshot", arguments={"include": ["mem"]})
        assert refused.payload["error"]["code"] == "E_RATE_LIMITED"
        release.set()
        answer = await end.receive("cmd_ack")
        assert (answer.in_reply_to, answer.payload["result"]) == (running_id, {"message": "answered"})
        assert (await end.receive()).type == "bye"
        assert await end.until_closed() == CloseCode.NORMAL


async def test_a_node_that_was_revoked_stays_to_be_looked_at(
    state_dir: Path, log: LogLines, broker: BrokerAddress, relay: PlayedRelay
) -> None:
    async with daemon(state_dir, log, broker, relay.url) as running:
        end = await relay.next()
        await end.challenge()
        await end.socket.close(CloseCode.REVOKED)
        status, _ = await running.until_relay_is("revoked: an operator must enrol this node again")
        assert status == 503
        assert not running.task.done()


SESSION: dict[str, Any] = {
    "session_id": ANT,
    "caller_id": "ant",
    "owner": "a" * 64,
    "tools": [{"name": "get_memory"}],
}


@pytest.mark.integration
async def test_a_request_survives_a_dropped_connection_that_resumes(
    state_dir: Path, log: LogLines, relay: PlayedRelay
) -> None:
    path = state_dir / "relay.sock"
    async with daemon(state_dir, log, relay_url=relay.url, socket=path), connected(path) as agent:
        end = await relay.next()
        await end.admit()
        await end.send_payload("session_open", SESSION)
        assert (await agent.notification())["params"]["caller_id"] == "ant"
        id_ = agent.send("caller_tool", {"tool": "get_memory"})
        request = (await end.receive("caller_tool")).payload
        end.drop()
        again = await relay.next()
        await again.admit(resumed=True)
        await again.send_payload("session_open", SESSION)
        assert (await again.receive("caller_tool")).payload == request
        ids = {name: request[name] for name in ("session_id", "request_id")}
        await again.send_payload("caller_tool_result", {**ids, "result": "there"})
        assert (await agent.response(id_))["result"] == "there"


@pytest.mark.integration
async def test_a_socket_that_cannot_be_made_ends_the_start(state_dir: Path, log: LogLines) -> None:
    (state_dir / "relay.sock").write_text("no socket")
    plan = DaemonPlan(NodeConfig(NO_BROKER, NO_RELAY), state_dir, 0, state_dir / "relay.sock")
    with pytest.raises(SocketFileError, match="is no socket"):
        await run_daemon(plan, log)


async def test_a_node_without_a_certificate_of_a_ca_says_so(
    tmp_path: Path, log: LogLines, broker: BrokerAddress
) -> None:
    files = IdentityFiles(tmp_path / "state")
    create_identity(files, NOW_MS, os.urandom)
    async with daemon(files.root, log, broker) as running:
        _, page = await running.get("/readyz")
        assert page["subsystems"]["identity"]["state"] == "self-signed: install a certificate"


@pytest.mark.integration
def test_a_daemon_loads_neither_the_certificate_library_nor_what_needs_it() -> None:
    listing = "import sys, kubelet.daemon.composition; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-P", "-c", listing], capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.split())
    assert "kubelet.session.link" in loaded
    assert not loaded & {
        "cryptography",
        "kubelet.identity.provisioning",
        "kubelet.identity.verification",
        "mcp",
        "relay",
        "schemas.certificates",
        "uvicorn",
    }
