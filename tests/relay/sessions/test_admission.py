"""How a node's connection becomes a session: the handshake and its ends."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from schemas.addresses import CONNECT_PATH
from schemas.errors import Failure, ToolError
from schemas.frames import (
    MAX_FRAME_BYTES,
    MAX_FRAME_BYTES_BEFORE_WELCOME,
    SUBPROTOCOL_1_1,
    SUBPROTOCOL_1_2,
    FrameReader,
)
from schemas.registry import SchemaRegistry
from tests.fakes.frames import frame_text
from tests.fakes.hub import Hub
from tests.fakes.scripted_socket import ScriptedSocket
from tests.fakes.serving import Server
from tests.fakes.session_stage import BOUND_S, Stage, admit, command, failure, goes_on
from tests.fakes.signer import DAY_MS, NOW_MS, OTHER_NODE_ID, TENANT, SimulatedCa

pytestmark = pytest.mark.asyncio(loop_scope="module")
NOW_S = NOW_MS // 1000


async def test_a_node_that_answers_the_challenge_is_welcome(stage: Stage) -> None:
    async with stage.end() as end:
        welcome = await end.authenticate()
        assert welcome.payload == {
            "session_id": end.session_id,
            "heartbeat_interval_ms": 60_000,
            "max_frame_bytes": MAX_FRAME_BYTES,
            "server_time_ms": NOW_MS,
            "resumed": False,
        }
        await goes_on(end)
        assert stage.known().connected
        assert stage.sessions_counted("opened") == 1
        assert stage.hub.counted("nodes_connected") == 1


@pytest.mark.parametrize(
    ("spoken", "named"),
    [(SUBPROTOCOL_1_1, None), (SUBPROTOCOL_1_2, ["system.echo", "system.metrics"])],
)
async def test_from_protocol_1_2_on_a_node_is_told_which_kinds_there_are(
    stage: Stage, spoken: str, named: list[str] | None
) -> None:
    async with stage.end(subprotocols=(spoken,)) as end:
        welcome = await end.authenticate()
        assert welcome.payload.get("kinds") == named


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        pytest.param({"token": {"nonce": "x" * 43}}, "token_nonce", id="wrong nonce"),
        pytest.param(
            {"certificate": SimulatedCa().issue(OTHER_NODE_ID).leaf_pem},
            "id_mismatch",
            id="another node's certificate",
        ),
        pytest.param(
            {"certificate": SimulatedCa("elsewhere").issue().leaf_pem}, "chain", id="a foreign root"
        ),
        pytest.param(
            {"certificate": SimulatedCa().issue(now_ms=NOW_MS - 91 * DAY_MS).leaf_pem},
            "validity",
            id="an expired certificate",
        ),
        pytest.param({"certificate": "none"}, "bad_certificate", id="no certificate"),
    ],
)
async def test_a_node_that_does_not_prove_itself_is_closed_with_4001(
    stage: Stage, members: dict[str, Any], reason: str
) -> None:
    async with stage.end() as end:
        await end.answer_challenge(**members)
        assert await end.until_closed() == (4001, [])
        assert stage.sessions_counted(f"refused_{reason}") == 1
        refused = await stage.hub.lines.until("node refused")
        assert refused["reason"] == reason
        assert await failure(stage.run()) is Failure.NODE_OFFLINE


async def test_a_revoked_node_is_closed_with_4003(
    tmp_path: Path, registry: SchemaRegistry, reader: FrameReader, server: Server
) -> None:
    hub = Hub(tmp_path, registry, revoked=[SimulatedCa().issue().kid])
    stage = Stage(hub, hub.sessions(), reader, server)
    async with stage.end() as end:
        await end.answer_challenge()
        code, frames = await end.until_closed()
        assert (code, [frame.payload for frame in frames]) == (4003, [{"reason": "revoked"}])
    hub.close()


@pytest.mark.holds("RFC-0005/7/ws-auth")
async def test_a_node_that_does_not_answer_in_time_is_closed_with_4001(
    hub: Hub, reader: FrameReader, server: Server
) -> None:
    stage = Stage(hub, hub.sessions(auth_timeout_s=0.01), reader, server)
    async with stage.end() as end:
        await end.receive("challenge")
        assert await end.until_closed() == (4001, [])
        assert stage.sessions_counted("refused_late") == 1


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param("", id="nothing"),
        pytest.param("{", id="garbage"),
        pytest.param("[]", id="no object"),
        pytest.param(frame_text("heartbeat"), id="a frame that does not belong here"),
        pytest.param(frame_text("auth", 2, answers=1), id="an answer to another challenge"),
        pytest.param(frame_text("auth", 2) + " " * MAX_FRAME_BYTES_BEFORE_WELCOME, id="over 8 KiB"),
        pytest.param(b"\x00\x01", id="binary"),
    ],
)
async def test_what_is_no_answer_to_the_challenge_is_closed_with_4009(stage: Stage, raw: str | bytes) -> None:
    async with stage.end() as end:
        await end.receive("challenge")
        await end.send_raw(raw)
        assert await end.until_closed() == (4009, [])
        assert stage.sessions_counted("refused_protocol") == 1
        assert stage.hub.nodes_of(TENANT) == []


@pytest.mark.parametrize("protocols", [None, ["mqtt"], ["edge-kubelet.v2"]])
async def test_without_the_subprotocol_the_upgrade_is_refused(
    stage: Stage, protocols: list[str] | None
) -> None:
    url = f"ws://{stage.address}{CONNECT_PATH}"
    offered = None if protocols is None else [Subprotocol(name) for name in protocols]
    with pytest.raises(InvalidStatus) as caught:
        async with connect(url, subprotocols=offered, proxy=None):
            raise AssertionError
    assert caught.value.response.status_code == 403


async def test_a_node_that_goes_before_it_answers_leaves_nothing(stage: Stage) -> None:
    async with stage.end() as end:
        await end.receive("challenge")
    await stage.until_ended()
    assert stage.sessions_counted("refused_gone") == 1
    assert stage.hub.counted("nodes_connected") == 0


async def test_a_node_that_goes_before_its_welcome_is_not_connected(hub: Hub) -> None:
    sessions = hub.sessions()
    # Challenged, and then no more.
    socket = ScriptedSocket(breaks_at=1)
    serving_it = asyncio.create_task(sessions.serve(socket))
    async with asyncio.timeout(BOUND_S):
        await admit(socket, hub.ca.issue())
        await serving_it
    assert hub.counted("nodes_connected") == 0
    assert not hub.nodes_of(TENANT)[0].connected
    with pytest.raises(ToolError) as caught:
        await sessions.run(command())
    assert caught.value.failure is Failure.NODE_OFFLINE
