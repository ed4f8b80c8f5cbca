"""What the frames of a connected node do: announcing, heartbeats, renewing and retiring."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import rfc8785

from relay.routing.port import Command, NodeRef
from relay.sessions.frame_handlers import FrameHandlers
from schemas.certificates import make_csr, verify_leaf
from schemas.errors import ToolError
from schemas.frames import SUBPROTOCOL, SUBPROTOCOL_1_1, SUBPROTOCOLS, FrameReader
from schemas.identity import Identity
from schemas.manifest import etag_of
from schemas.session import CloseCode, ProtocolError
from tests.fakes.frames import PAYLOADS
from tests.fakes.hub import Hub
from tests.fakes.node_end import NodeEnd
from tests.fakes.real_ca import RealCa, csr_of
from tests.fakes.serving import Server
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, SimulatedNode, key_named
from tests.fakes.view_stage import WorkCounts

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 30
HALF_A_LIFE_MS = 45 * DAY_MS
HOUR_MS = 3_600_000
ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"


class Stage:
    """The nodes' endpoint of a relay whose nodes have leaves of a real CA."""

    def __init__(self, hub: Hub, real: RealCa, server: Server, reader: FrameReader) -> None:
        self.hub = hub
        self.real = real
        self.node = real.node()
        self.sessions = hub.sessions(authority=real.ca)
        self._address = server.address
        self._reader = reader
        server.serve_socket = self.sessions.serve

    @asynccontextmanager
    async def open(
        self, node: SimulatedNode | None = None, subprotocols: Sequence[str] = (SUBPROTOCOL,)
    ) -> AsyncIterator[NodeEnd]:
        """Hold a session that announces as its leaf says."""
        async with NodeEnd.connected(self._address, node or self.node, self._reader, subprotocols) as end:
            await end.authenticate()
            yield end

    def end_sessions(self, node: SimulatedNode) -> list[str]:
        """Revoke the one leaf that ``node`` has, as far as sessions go."""
        kid = node.kid

        def is_it(leaf: Identity) -> bool:
            return leaf.kid == kid

        return self.sessions.end_sessions(is_it, CloseCode.REVOKED)

    def manifest(self, node: SimulatedNode, **members: Any) -> dict[str, Any]:
        """Return the next manifest of ``node``, as it is sent in a frame."""
        document: dict[str, Any] = json.loads(
            node.manifest(issued_at_ms=self.hub.clock.advance(1), **members)
        )
        return document


@pytest.fixture
def stage(hub: Hub, tmp_path: Path, server: Server, reader: FrameReader) -> Stage:
    return Stage(hub, RealCa(hub, tmp_path / "ca"), server, reader)


@pytest.mark.parametrize(
    ("subprotocols", "named"),
    [
        pytest.param(SUBPROTOCOLS, True, id="a node of this version"),
        pytest.param((SUBPROTOCOL_1_1, SUBPROTOCOL), True, id="a node of protocol 1.1"),
        pytest.param((SUBPROTOCOL,), False, id="a node of the version before"),
    ],
)
async def test_a_heartbeat_is_answered_with_what_the_broker_sent_last(
    stage: Stage, subprotocols: Sequence[str], *, named: bool
) -> None:
    async with stage.open(subprotocols=subprotocols) as end:
        assert set(await asked(end, "heartbeat", PAYLOADS["heartbeat"])) == {"server_time_ms"}
        stage.hub.fleet.inventory.received(NODE_ID, b"a manifest")
        answer = await asked(end, "heartbeat", PAYLOADS["heartbeat"])
    assert answer.get("broker_etag") == (etag_of(b"a manifest") if named else None)


@pytest.mark.parametrize("by_broker_first", [False, True])
async def test_what_a_connected_node_signs_bears_out_a_clock_that_was_set(
    stage: Stage, *, by_broker_first: bool
) -> None:
    clock = stage.hub.judged_by
    async with stage.open() as end:
        clock()
        stage.hub.clock.step(DAY_MS)
        clock()
        assert not clock.is_trusted()
        manifest = stage.manifest(stage.node)
        if by_broker_first:
            stage.hub.fleet.offer_manifest(NODE_ID, rfc8785.dumps(manifest), "broker")
            assert not clock.is_trusted()
        await asked(end, "announce", manifest)
        assert clock.is_trusted()


@pytest.mark.parametrize(
    ("subprotocols", "told_s"),
    [
        pytest.param(SUBPROTOCOLS, [None, 84, None, 108, None], id="a node of this version"),
        pytest.param((SUBPROTOCOL,), [None] * 5, id="a node of the version before"),
    ],
)
async def test_a_node_that_stays_connected_learns_that_the_fleet_has_grown(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, subprotocols: Sequence[str], told_s: list[int | None]
) -> None:
    monkeypatch.setattr("relay.sessions.frame_handlers._FEW", 0)
    monkeypatch.setattr("relay.sessions.frame_handlers._MANY", 10)

    async def asked_for(end: NodeEnd) -> int | None:
        answer = await asked(end, "heartbeat", PAYLOADS["heartbeat"])
        return answer["heartbeat_interval_ms"] // 1000 if "heartbeat_interval_ms" in answer else None

    hub = stage.hub
    async with stage.open(subprotocols=subprotocols) as end:
        told = [await asked_for(end)]
        hub.announce(stage.node)
        told += [await asked_for(end), await asked_for(end)]
        hub.announce(stage.real.node(OTHER_NODE_ID))
        told.append(await asked_for(end))
        hub.fleet.retire(frozenset({OTHER_NODE_ID}), ())
        told.append(await asked_for(end))  # a shorter one waits for the next welcome
    assert told == told_s


async def test_who_follows_announces_is_told_of_those_that_were_accepted(stage: Stage) -> None:
    accepted: list[NodeRef] = []
    stage.hub.one_way.on_announce(accepted.append)
    async with stage.open() as end:
        rejected = stage.manifest(stage.node, expires_at_ms=0)
        assert (await asked(end, "announce", rejected))["ok"] is False
        assert accepted == []
        for _ in range(2):
            assert (await asked(end, "announce", stage.manifest(stage.node)))["ok"] is True
        assert accepted == [NodeRef(TENANT, NODE_ID, end.session_id)] * 2


async def test_a_fault_of_one_that_follows_announces_does_not_end_the_session(stage: Stage) -> None:
    def broken(_node: NodeRef) -> None:
        raise RuntimeError

    stage.hub.one_way.on_announce(broken)
    async with stage.open() as end:
        for _ in range(2):
            assert (await asked(end, "announce", stage.manifest(stage.node)))["ok"] is True
    assert len(stage.hub.lines.entries("announce not followed")) == 1


async def asked(end: NodeEnd, type_: str, payload: Mapping[str, Any] | bytes) -> dict[str, Any]:
    """Send a frame and return the payload of the answer to it."""
    msg_id = await end.send(type_, payload)
    answer = await end.receive(f"{type_}_ack")
    assert answer.in_reply_to == msg_id
    return dict(answer.payload)


async def renewed(stage: Stage, end: NodeEnd) -> SimulatedNode:
    """Let the node of ``end`` renew its leaf, and return it with the new one."""
    answer = await asked(end, "renew", {"csr": csr_of(end.node)})
    assert answer["ok"] is True
    return stage.real.renewed(end.node, answer["certificate"])


# --- announcing, beating, answering -------------------------------------------------------------------


async def test_a_frame_that_this_relay_may_not_send_is_not_blamed_on_the_node(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(*_: object) -> None:
        raise ProtocolError("a frame over the limit")

    monkeypatch.setattr(FrameHandlers, "handle", handle)
    monkeypatch.setattr(FrameHandlers, "handle_now", lambda *_: False)
    async with stage.open() as end:
        await end.send("heartbeat", PAYLOADS["heartbeat"])
        assert (await end.until_closed())[0] != CloseCode.PROTOCOL_VIOLATION
    assert stage.hub.counted("sessions_total", event="protocol_violation") == 0


async def test_a_manifest_is_parsed_encoded_and_validated_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, renewed = stage.node.manifest(), stage.node.manifest(issued_at_ms=NOW_MS + 1)
    async with stage.open() as end:
        work = WorkCounts(monkeypatch)
        assert (await asked(end, "announce", wire))["ok"] is True
        assert work.counts == {"parsed": 1, "encoded": 1, "validated": 1}
        # Nor are the same bytes again, or the same document signed again.
        assert (await asked(end, "announce", wire))["ok"] is True
        assert (await asked(end, "announce", renewed))["manifest_etag"] == etag_of(renewed)
        assert work.counts == {"parsed": 1, "encoded": 1, "validated": 1}


async def test_a_heartbeat_is_answered_with_the_time(stage: Stage) -> None:
    async with stage.open() as end:
        stage.hub.clock.advance(77)
        assert await asked(end, "heartbeat", PAYLOADS["heartbeat"]) == {"server_time_ms": NOW_MS + 77}
    assert stage.hub.counted("heartbeats_total", verdict="unknown_manifest") == 1


# --- renewing -----------------------------------------------------------------------------------------


async def test_a_node_renews_its_leaf_over_the_session_which_goes_on(stage: Stage) -> None:
    stage.hub.clock.advance(HALF_A_LIFE_MS)
    async with stage.open() as end:
        answer = await asked(end, "renew", {"csr": csr_of(stage.node)})
        fresh = verify_leaf(answer["certificate"], [answer["roots"]], stage.hub.clock())
        assert (fresh.node_id, fresh.public_key) == (NODE_ID, stage.node.public_key)
        assert answer["roots"] == stage.real.ca.root_pem()
        assert stage.hub.audited() == [
            {
                "ts_ms": stage.hub.clock(),
                "event": "renewed",
                "node_id": NODE_ID,
                "tenant": TENANT,
                "kid": fresh.kid,
            }
        ]
        await asked(end, "heartbeat", PAYLOADS["heartbeat"])


async def test_what_the_new_leaf_signs_is_believed_at_once_without_the_broker(stage: Stage) -> None:
    stage.hub.clock.advance(HALF_A_LIFE_MS)
    async with stage.open() as end:
        node = await renewed(stage, end)
        assert (await asked(end, "announce", stage.manifest(node)))["ok"] is True
    signer = stage.hub.fleet.signer_of(NODE_ID)
    assert signer is not None
    assert signer.kid == node.kid != stage.node.kid


async def test_the_session_stands_on_the_leaf_that_its_node_announces_with(stage: Stage) -> None:
    stage.hub.clock.advance(HALF_A_LIFE_MS)
    async with stage.open() as end:
        await asked(end, "announce", stage.manifest(stage.node))
        node = await renewed(stage, end)
        await asked(end, "announce", stage.manifest(node))
        assert stage.end_sessions(stage.node) == []
        await asked(end, "heartbeat", PAYLOADS["heartbeat"])
        assert stage.end_sessions(node) == [NODE_ID]
        assert (await end.until_closed())[0] == 4003


async def test_until_it_announces_with_the_new_leaf_the_session_stands_on_the_old_one(stage: Stage) -> None:
    stage.hub.clock.advance(HALF_A_LIFE_MS)
    async with stage.open() as end:
        await asked(end, "announce", stage.manifest(stage.node))
        node = await renewed(stage, end)
        await asked(end, "announce", stage.manifest(node, signer=key_named("a thief")))
        assert stage.end_sessions(node) == []
        assert stage.end_sessions(stage.node) == [NODE_ID]
        assert (await end.until_closed())[0] == 4003


async def test_a_manifest_that_the_broker_brought_first_moves_the_session_too(stage: Stage) -> None:
    stage.hub.clock.advance(HALF_A_LIFE_MS)
    async with stage.open() as end:
        await asked(end, "announce", stage.manifest(stage.node))
        node = await renewed(stage, end)
        manifest = stage.manifest(node)
        wire = node.manifest(issued_at_ms=manifest["issued_at_ms"])
        stage.hub.fleet.offer_manifest(NODE_ID, wire, "broker")
        assert (await asked(end, "announce", manifest))["ok"] is True
        assert stage.end_sessions(stage.node) == []
        assert stage.end_sessions(node) == [NODE_ID]


async def test_a_session_of_an_old_key_does_not_escape_with_the_public_manifest_of_a_new_one(
    stage: Stage,
) -> None:
    async with stage.open() as thief:
        await asked(thief, "announce", stage.manifest(stage.node))
        # The operator gives the node another key; who stole the old one sees what the new one publishes.
        honest = stage.real.node(key=key_named("the node's new key"), replace=True)
        stage.hub.fleet.offer_identity(NODE_ID, honest.leaf_pem)
        assert (await asked(thief, "announce", stage.manifest(honest)))["ok"] is True
        assert stage.end_sessions(honest) == []
        assert stage.end_sessions(stage.node) == [NODE_ID]
        assert (await thief.until_closed())[0] == 4003


async def test_a_leaf_that_is_young_is_not_renewed_and_the_node_is_told_when(stage: Stage) -> None:
    async with stage.open() as end:
        answer = await asked(end, "renew", {"csr": csr_of(stage.node)})
        assert (answer["ok"], answer["error"]["code"]) == (False, "E_RATE_LIMITED")
        assert 0 < answer["error"]["retry_after_ms"] <= HALF_A_LIFE_MS
        await asked(end, "heartbeat", PAYLOADS["heartbeat"])
    assert len(stage.real.ca.records().issued) == 1


@pytest.mark.parametrize(
    "key", [pytest.param("a thief", id="another key"), pytest.param(None, id="another node")]
)
async def test_a_request_for_another_node_or_key_is_refused_and_the_session_goes_on(
    stage: Stage, key: str | None
) -> None:
    stage.hub.clock.advance(HALF_A_LIFE_MS)
    csr = make_csr(key_named(key), NODE_ID) if key else make_csr(stage.node.key, NODE_ID[:-1] + "z")
    async with stage.open() as end:
        answer = await asked(end, "renew", {"csr": csr})
        assert (answer["ok"], answer["error"]["code"]) == (False, "E_ATTESTATION_FAILED")
        await asked(end, "heartbeat", PAYLOADS["heartbeat"])
    assert len(stage.real.ca.records().issued) == 1


class Held:
    """The ledger of the CA, which is locked until the test releases it."""

    def __init__(self) -> None:
        self.free = Event()
        self.asked = 0

    def held(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``act``, which waits for the ledger."""

        def waits(*arguments: str) -> Any:
            self.asked += 1
            assert self.free.wait(BOUND_S)
            return act(*arguments)

        return waits

    async def until_asked(self) -> None:
        async with asyncio.timeout(BOUND_S):
            while not self.asked:  # noqa: ASYNC110 - the thread has no event to await
                await asyncio.sleep(0)


@pytest.fixture
def held(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held, ca = Held(), stage.real.ca
    for name in ("renew", "revoke"):
        monkeypatch.setattr(ca, name, held.held(getattr(ca, name)))
    stage.hub.clock.advance(HALF_A_LIFE_MS)
    yield held
    held.free.set()


@pytest.mark.parametrize("what", ["renew", "retire"])
async def test_while_the_ca_is_busy_the_node_is_heard_and_asks_for_no_more(
    stage: Stage, held: Held, what: str
) -> None:
    wanted = Command(NODE_ID, ECHO_NAME, {"message": "ping"}, 10_000, "01HZX9K3M4P7Q8R9S0T1V2W3XW")
    payload = {"csr": csr_of(stage.node)} if what == "renew" else {}
    async with stage.open() as end:
        first = await end.send(what, payload)
        await held.until_asked()
        task = asyncio.create_task(stage.sessions.run(wanted))
        await end.acknowledge(await end.receive("cmd"), {"message": "pong"})
        assert await asyncio.wait_for(task, BOUND_S) == {"ok": True, "result": {"message": "pong"}}
        refused = await asked(end, what, payload)
        assert (refused["ok"], refused["error"]["code"]) == (False, "E_RATE_LIMITED")
        held.free.set()
        answer = await end.receive(f"{what}_ack")
        assert (answer.in_reply_to, answer.payload["ok"], held.asked) == (first, True, 1)


async def test_who_was_answered_may_ask_again(stage: Stage, held: Held) -> None:
    held.free.set()
    async with stage.open() as end:
        csr = {"csr": make_csr(key_named("a thief"), NODE_ID)}
        assert (await asked(end, "renew", csr))["error"]["code"] == "E_ATTESTATION_FAILED"
        stage.hub.clock.advance(HOUR_MS)
        assert (await asked(end, "renew", {"csr": csr_of(stage.node)}))["ok"] is True


async def test_a_session_that_the_relay_closes_while_the_ca_is_busy_breaks_no_protocol(
    stage: Stage, held: Held
) -> None:
    async with stage.open() as end:
        await end.send("renew", {"csr": csr_of(stage.node)})
        await held.until_asked()
        assert stage.end_sessions(stage.node) == [NODE_ID]
        assert (await end.until_closed())[0] == 4003
    held.free.set()
    async with asyncio.timeout(BOUND_S):
        while "renewed" not in stage.hub.audit_file.read_text():  # noqa: ASYNC110 - the CA has no event to await
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)  # whatever was to be sent was tried
    assert [line["event"] for line in stage.hub.audited()] == ["renewed"]
    assert stage.hub.counted("sessions_total", event="protocol_violation") == 0


# --- retiring -----------------------------------------------------------------------------------------


async def test_a_node_that_retires_is_told_that_it_is_done_and_closed_with_4003(stage: Stage) -> None:
    async with stage.open() as end:
        await asked(end, "announce", stage.manifest(stage.node))
        await end.send("retire", {})
        code, frames = await end.until_closed()
    assert (code, [frame.type for frame in frames]) == (4003, ["retire_ack", "bye"])
    assert frames[0].payload == {"ok": True}
    assert frames[1].payload == {"reason": "revoked"}
    assert stage.real.ca.revoked_kids() == {stage.node.kid}
    assert [line["event"] for line in stage.hub.audited()] == ["retired"]


async def test_a_node_that_cannot_retire_is_told_so_and_goes_on(stage: Stage) -> None:
    stage.real.ca.root_file.unlink()
    async with stage.open() as end:
        answer = await asked(end, "retire", {})
        assert (answer["ok"], answer["error"]["code"]) == (False, "E_INTERNAL")
        await asked(end, "heartbeat", PAYLOADS["heartbeat"])


async def test_a_call_to_a_node_that_has_retired_finds_no_session(stage: Stage) -> None:
    async with stage.open() as end:
        await end.send("retire", {})
        await end.until_closed()
    wanted = Command(NODE_ID, ECHO_NAME, {"message": "ping"}, 10_000, "01HZX9K3M4P7Q8R9S0T1V2W3XW")
    with pytest.raises(ToolError, match="E_NODE_OFFLINE"):
        await stage.sessions.run(wanted)


async def test_a_node_that_is_shut_out_as_it_retires_is_told_first_that_it_is_done(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, revoke = asyncio.get_running_loop(), stage.real.ca.revoke

    async def end_sessions() -> None:
        assert stage.end_sessions(stage.node) == [NODE_ID]
        for _ in range(20):
            await asyncio.sleep(0)  # whatever was to be done aside is done

    def revoked(*target: str) -> list[str]:
        """Revoke with an effect before it is acknowledged."""
        kids = revoke(*target)
        asyncio.run_coroutine_threadsafe(end_sessions(), loop).result(BOUND_S)
        return kids

    monkeypatch.setattr(stage.real.ca, "revoke", revoked)
    async with stage.open() as end:
        await end.send("retire", {})
        code, frames = await end.until_closed()
    assert (code, [frame.type for frame in frames]) == (4003, ["retire_ack", "bye"])
    assert stage.hub.counted("sessions_total", event="protocol_violation") == 0
    assert stage.hub.counted("nodes_connected") == 0


async def test_a_node_that_could_not_retire_can_be_shut_out(stage: Stage) -> None:
    stage.real.ca.root_file.unlink()
    async with stage.open() as end:
        assert (await asked(end, "retire", {}))["ok"] is False
        assert stage.end_sessions(stage.node) == [NODE_ID]
        assert (await end.until_closed())[0] == 4003
