import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute

from relay.auth.accepted_keys import AcceptedKeys
from relay.auth.agent_tokens import key_id
from relay.auth.permissions import Rights
from relay.auth.revoked_tokens import RevokedTokens
from relay.auth.token_keys import TokenKeys
from relay.auth.watched_keys import WatchedKeys
from relay.auth.watched_tokens import WatchedTokens
from relay.calls.call_record import CallAnswer
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.name_ledger import NameLedger
from relay.fleet.watched_names import WatchedNames
from relay.ledger import LedgerError
from relay.pki.errors import AuthorityError
from relay.pki.join_tokens import JoinTokens
from relay.pki.watched_join_tokens import WatchedJoinTokens
from relay.server.decision_records import DecisionRecords
from relay.server.descriptor_reserve import DescriptorReserve
from relay.server.follow_ups import Follow, FollowUps
from relay.server.ledger_freshness import SHARED
from relay.server.trust_watcher import TrustWatcher
from relay.server.watched_leaves import WatchedLeaves
from schemas.addresses import CONNECT_PATH
from schemas.errors import Failure, ToolError
from schemas.files import write_atomic
from schemas.frames import FrameReader
from schemas.registry import SchemaRegistry
from schemas.tokens import TokenError
from tests.fakes.callers import call_of
from tests.fakes.disk import full_disk
from tests.fakes.frames import PAYLOADS
from tests.fakes.hub import Hub
from tests.fakes.node_end import NodeEnd
from tests.fakes.real_ca import RealCa
from tests.fakes.serving import Server
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, SimulatedNode, key_named

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 10
READERS = Rights(TENANT, frozenset({"read_only"}))
LEAF_LIFE_MS = 90 * DAY_MS
THIRD_NODE_ID = NODE_ID[:-1] + "1"
TOKEN_KEY, NEXT_TOKEN_KEY = (bytes(key_named(f"token key {number}").verify_key) for number in (1, 2))
SOURCE = {
    "ca/ledger.jsonl": WatchedLeaves.name,
    "ca/root.pem": WatchedLeaves.name,
    "revoked_tokens.jsonl": WatchedTokens.name,
    "token_keys.jsonl": WatchedKeys.name,
    "node_names.jsonl": WatchedNames.name,
}
"""What each file is called in the log."""


class Shared:
    """What tells other relays, and is told by them."""

    def __init__(self) -> None:
        self.understands = True
        self.changes = 0
        self.kinds: set[str] = set()

    def changed(self, *kinds: str) -> None:
        """Count a change, and keep what has changed."""
        self.changes += 1
        self.kinds |= {*kinds}

    async def written(self, within_s: float) -> None:
        """Return after ``within_s``."""
        await asyncio.sleep(within_s)


class Stage:
    """A relay that watches its CA and its list of void tokens; others change them as commands do."""

    def __init__(self, hub: Hub, directory: Path, server: Server | None, reader: FrameReader) -> None:
        self.hub = hub
        self.directory = directory
        self.real = RealCa(hub, directory / "ca")
        self.keys = TokenKeys(directory / "token_keys.jsonl", self.real.ca, hub.clock)
        self.accepted = AcceptedKeys(hub.clock)
        self.join_tokens = JoinTokens(directory / "join_tokens.jsonl", hub.clock, os.urandom)
        self.reserve = DescriptorReserve(1)
        self.sharing = Shared()
        self.sessions = hub.sessions(authority=self.real.ca)
        self.notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=1000)
        self.gateway = hub.gateway(self.sessions)
        self.leaves_looked_at = 0
        self.watch = self.watching()
        self._reader = reader
        self._server = server
        if server is not None:
            server.app = Starlette(routes=[WebSocketRoute(CONNECT_PATH, self.sessions.serve)])

    def watching(self, *follows: Follow, interval_s: float = 1000) -> TrustWatcher:
        self.follow_ups = FollowUps([self._follow, *follows], retry_s=1000)
        hub = self.hub
        records = DecisionRecords(hub.audit, hub.log)
        names = WatchedNames(NameLedger(self.directory / "node_names.jsonl", hub.clock), hub.fleet, hub.log)
        leaves = WatchedLeaves(
            self.real.ca,
            fleet=hub.fleet,
            sessions=self.sessions,
            notifier=self.notifier,
            retire=names.retire,
            due=self.follow_ups.due,
            record=records.add,
            log=hub.log,
        )
        tokens = WatchedTokens(
            RevokedTokens(self.directory / "revoked_tokens.jsonl"),
            [hub.authenticator.revoke, self.gateway.revoke],
            records.add,
            hub.log,
        )
        keys = WatchedKeys(self.keys, self.accepted, lambda: hub.fleet.trust.roots, records.add)
        return TrustWatcher(
            [leaves, tokens, WatchedJoinTokens(self.join_tokens), keys, names],
            freshness=hub.freshness,
            sharing=self.sharing,
            reserve=self.reserve,
            follow_ups=self.follow_ups,
            after_poll=[self.sessions.end_expired, records.write],
            log=hub.log,
            interval_s=interval_s,
        )

    async def _follow(self) -> bool:
        self.leaves_looked_at += 1
        return True

    async def poll(self) -> None:
        """Look, and let those follow who are behind."""
        await self.watch.poll()
        assert await self.follow_ups.follow()

    def close(self) -> None:
        """Give back what the operating system gave."""
        self.reserve.close()

    def revoke_token(self, jti: str) -> None:
        """Revoke a token as the command does."""
        RevokedTokens(self.directory / "revoked_tokens.jsonl").revoke(jti, self.hub.clock())

    def label(self, node_id: str, label: str) -> None:
        """Label a node as the command does."""
        NameLedger(self.directory / "node_names.jsonl", self.hub.clock).label(node_id, TENANT, label)

    @asynccontextmanager
    async def session(self, node: SimulatedNode) -> AsyncIterator[NodeEnd]:
        """Hold a session of ``node`` whose tools are listed."""
        assert self._server is not None
        async with NodeEnd.connected(self._server.address, node, self._reader) as end:
            await end.authenticate()
            await end.send("announce", json.loads(node.manifest(issued_at_ms=self.hub.clock.advance(1))))
            assert (await end.receive("announce_ack")).payload["ok"] is True
            yield end

    def listed(self) -> set[str]:
        return {tool.node_id for tool in self.hub.fleet.selected.listed(READERS)}

    def events(self) -> list[dict[str, Any]]:
        """Return the audit's lines that are not about calls, without their time."""
        lines = self.hub.audited() if self.hub.audit_file.exists() else []
        return [
            {name: value for name, value in line.items() if name != "ts_ms"}
            for line in lines
            if "event" in line
        ]

    def call(self, node: SimulatedNode, token: str | None = None) -> asyncio.Task[CallAnswer]:
        name = f"sysecho.{node.node_id}.echo.invoke"
        request = call_of(token or self.hub.token(), name, {"message": "ping"})
        return asyncio.create_task(self.gateway.call(request))


@pytest.fixture
def stage(hub: Hub, tmp_path: Path, server: Server, reader: FrameReader) -> Iterator[Stage]:
    stage = Stage(hub, tmp_path, server, reader)
    stage.watch.begin()
    yield stage
    stage.close()


async def code_of(task: asyncio.Task[CallAnswer]) -> str:
    answer = await asyncio.wait_for(task, BOUND_S)
    return str(answer.error["code"]) if answer.error else "ok"


async def goes_on(end: NodeEnd) -> None:
    await end.send("heartbeat", PAYLOADS["heartbeat"])
    await end.receive("heartbeat_ack")


def failure(hub: Hub, node: SimulatedNode) -> Failure | None:
    try:
        hub.fleet.resolve(f"sysecho.{node.node_id}.echo.invoke", READERS)
    except ToolError as error:
        return error.failure
    return None


# --- leaves -------------------------------------------------------------------------------------------


async def test_a_node_that_comes_to_another_tenant_is_audited_once(stage: Stage) -> None:
    before = stage.real.node(tenant="acme")
    await stage.watch.poll()
    after = stage.real.node(tenant="globex", replace=True)
    for _ in range(2):
        await stage.watch.poll()
    assert stage.events() == [
        {"event": "leaf_revoked", "kid": before.kid},
        {"event": "tenant_changed", "node_id": NODE_ID, "tenant": "globex", "kid": after.kid},
    ]


@pytest.mark.parametrize("by", ["node", "kid"])
async def test_what_an_operator_revokes_is_shut_out_at_the_next_look(stage: Stage, by: str) -> None:
    node, other = stage.real.node(), stage.real.node(OTHER_NODE_ID)
    async with stage.session(node) as end, stage.session(other) as others_end:
        calling = stage.call(node)
        await end.receive("cmd")
        stage.real.as_operator().revoke(node.node_id if by == "node" else node.kid)
        assert stage.listed() == {NODE_ID, OTHER_NODE_ID}
        await stage.watch.poll()
        assert stage.listed() == {OTHER_NODE_ID}
        assert await code_of(calling) == "E_ATTESTATION_FAILED"
        code, frames = await end.until_closed()
        assert (code, [frame.payload for frame in frames]) == (4003, [{"reason": "revoked"}])
        assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED
        assert await code_of(stage.call(node)) == "E_ATTESTATION_FAILED"
        await goes_on(others_end)
    assert stage.events() == [{"event": "leaf_revoked", "kid": node.kid}]
    assert stage.hub.counted("sessions_total", event="shut_out") == 1
    assert [line["outcome"] for line in stage.hub.audited() if "outcome" in line] == ["error"]


async def test_a_revoked_node_does_not_come_back(stage: Stage) -> None:
    node = stage.real.node()
    async with stage.session(node) as end:
        stage.real.as_operator().revoke(NODE_ID)
        await stage.watch.poll()
        await end.until_closed()
    stage.hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    wire = node.manifest(issued_at_ms=stage.hub.clock.advance(1))
    stage.hub.fleet.offer_manifest(NODE_ID, wire, "broker")
    assert stage.listed() == set()
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED
    with pytest.raises(AssertionError):
        async with stage.session(node):
            raise NotImplementedError


async def test_a_node_that_is_not_connected_is_gone_too(stage: Stage) -> None:
    node = stage.real.node()
    stage.hub.announce(node)
    assert failure(stage.hub, node) is None
    stage.real.as_operator().revoke(NODE_ID)
    await stage.watch.poll()
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED


async def test_a_session_that_waits_to_be_resumed_cannot_be(stage: Stage) -> None:
    node = stage.real.node()
    async with stage.session(node) as end:
        calling = stage.call(node)
        await end.receive("cmd")
    async with asyncio.timeout(BOUND_S):
        while stage.hub.counted("nodes_connected"):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
    stage.real.as_operator().revoke(NODE_ID)
    await stage.watch.poll()
    assert await code_of(calling) == "E_ATTESTATION_FAILED"


async def test_a_node_that_renewed_goes_on_without_its_old_leaf(stage: Stage) -> None:
    node = stage.real.node()
    async with stage.session(node) as end:
        fresh = stage.real.renewed(node)
        stage.hub.fleet.offer_identity(NODE_ID, fresh.leaf_pem)
        await end.send("announce", json.loads(fresh.manifest(issued_at_ms=stage.hub.clock.advance(1))))
        await end.receive("announce_ack")
        stage.real.as_operator().revoke(node.kid)
        await stage.watch.poll()
        await goes_on(end)
        assert stage.listed() == {NODE_ID}
        stage.real.as_operator().revoke(fresh.kid)
        await stage.watch.poll()
        assert (await end.until_closed())[0] == 4003
    assert stage.listed() == set()


async def test_a_node_that_was_given_another_key_comes_in_with_that_alone(stage: Stage) -> None:
    node = stage.real.node()
    async with stage.session(node) as end:
        fresh = stage.real.node(key=key_named("another key"), replace=True)
        await stage.watch.poll()
        assert (await end.until_closed())[0] == 4003
    async with stage.session(fresh) as end:
        await goes_on(end)
        assert stage.listed() == {NODE_ID}
        assert failure(stage.hub, fresh) is None


async def test_who_listens_is_told_at_once_and_does_not_wait_for_the_next_second(stage: Stage) -> None:
    heard = asyncio.Event()

    async def listener() -> None:
        heard.set()

    node = stage.real.node()
    stage.hub.connect(node)
    stage.notifier.listen(READERS, listener)
    task = asyncio.create_task(stage.notifier.run())  # looks every thousand seconds unless it is woken
    stage.real.as_operator().revoke(NODE_ID)
    await stage.watch.poll()
    await asyncio.wait_for(heard.wait(), BOUND_S)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_what_needs_to_know_of_leaves_is_told_of_every_change_and_of_nothing_else(stage: Stage) -> None:
    await stage.poll()
    await stage.poll()
    assert stage.leaves_looked_at == 1  # as it began
    stage.real.node()
    await stage.poll()
    assert stage.leaves_looked_at == 2
    stage.real.as_operator().revoke(NODE_ID)
    await stage.poll()
    await stage.poll()
    assert stage.leaves_looked_at == 3
    assert len(stage.events()) == 1


async def test_a_node_that_leaves_for_good_is_in_the_audit_as_revoked(stage: Stage) -> None:
    node = stage.real.node()
    async with stage.session(node) as end:
        await end.send("retire", {})
        assert (await end.until_closed())[0] == 4003
    await stage.watch.poll()
    assert [event["event"] for event in stage.events()] == ["retired", "leaf_revoked"]
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED


# --- roots and time -----------------------------------------------------------------------------------


async def test_when_a_root_is_withdrawn_the_sessions_of_its_leaves_end_with_4001(stage: Stage) -> None:
    node, other = stage.real.node(), stage.real.node(OTHER_NODE_ID)
    stage.real.as_operator().rotate_root(1)
    await stage.watch.poll()
    renewed = stage.real.renewed(other)
    async with stage.session(node) as end, stage.session(renewed) as others_end:
        await goes_on(end)
        assert stage.events() == []
        stage.hub.clock.advance(DAY_MS)
        await stage.watch.poll()
        assert await code_of(stage.call(node)) == "E_ATTESTATION_FAILED"
        assert (await end.until_closed())[0] == 4001
        await goes_on(others_end)
    assert stage.events() == [{"event": "root_withdrawn"}]
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED


async def test_a_leaf_of_a_root_that_was_withdrawn_is_not_believed_again(stage: Stage) -> None:
    node = stage.real.node()
    stage.hub.announce(node)
    stage.real.as_operator().rotate_root(1)
    await stage.watch.poll()
    assert failure(stage.hub, node) is None
    stage.hub.clock.advance(DAY_MS)
    await stage.watch.poll()
    stage.hub.announce(node, issued_at_ms=stage.hub.clock())
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED


async def test_the_session_of_a_leaf_that_has_run_out_ends(stage: Stage) -> None:
    node = stage.real.node()
    stage.hub.clock.advance(LEAF_LIFE_MS - 60_000)
    async with stage.session(node) as end:
        await stage.watch.poll()
        await goes_on(end)
        calling = stage.call(node)
        await end.receive("cmd")
        stage.hub.clock.advance(60_000)
        assert stage.listed() == set()  # the manifest has ended with it
        await stage.watch.poll()
        assert await code_of(calling) == "E_ATTESTATION_FAILED"
        assert (await end.until_closed())[0] == 4001
    assert failure(stage.hub, node) is Failure.MANIFEST_INVALID


# --- tokens -------------------------------------------------------------------------------------------


async def test_a_token_that_an_operator_revokes_is_void_at_the_next_look_and_its_calls_end(
    stage: Stage,
) -> None:
    node = stage.real.node()
    revoked, other = stage.hub.token(), stage.hub.token()
    jti = stage.hub.authenticator.identify(revoked).jti
    async with stage.session(node) as end:
        ends = stage.call(node, revoked)
        await end.receive("cmd")
        answered = stage.call(node, other)
        command = await end.receive("cmd")
        stage.revoke_token(jti)
        await stage.watch.poll()
        assert await code_of(ends) == "E_SAFETY_DENIED"
        with pytest.raises(TokenError, match="revoked"):
            stage.hub.authenticator.identify(revoked)
        result = {"message": "ping", "received_at_ms": stage.hub.clock(), "node_id": NODE_ID}
        await end.acknowledge(command, result)
        assert await code_of(answered) == "ok"
        await stage.watch.poll()
    assert stage.events() == [{"event": "token_revoked", "jti": jti}]


# --- when it cannot be read ---------------------------------------------------------------------------


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"{\n")


def emptied(path: Path) -> None:
    path.write_text("")


def made_strange(path: Path) -> None:
    path.write_text('{"action":"forgive","kid":"ab"}\n')


def removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param("ca/ledger.jsonl", torn, id="a line that is none"),
        pytest.param("ca/ledger.jsonl", made_strange, id="an unknown entry"),
        pytest.param("ca/root.pem", emptied, id="the root is empty"),
        pytest.param("ca/root.pem", removed, id="the root is gone"),
        pytest.param("revoked_tokens.jsonl", torn, id="the list of tokens"),
        pytest.param("token_keys.jsonl", torn, id="the keys of tokens"),
        pytest.param("revoked_tokens.jsonl", made_strange, id="an entry that names no token"),
        pytest.param("node_names.jsonl", torn, id="the nodes' names"),
        pytest.param("node_names.jsonl", made_strange, id="an entry that names no node"),
    ],
)
async def test_what_is_damaged_changes_nothing_that_is_in_effect_and_is_said_once(
    stage: Stage, name: str, damage: Callable[[Path], None]
) -> None:
    revoked, node = stage.real.node(OTHER_NODE_ID), stage.real.node()
    stage.hub.announce(revoked)
    void, good = stage.hub.token(), stage.hub.token()
    stage.revoke_token(stage.hub.authenticator.identify(void).jti)
    stage.keys.add(TOKEN_KEY, NOW_MS)
    stage.real.as_operator().revoke(OTHER_NODE_ID)
    stage.label(NODE_ID, "greenhouse pi")
    async with stage.session(node) as end:
        await stage.watch.poll()
        damage(stage.directory / name)
        for _ in range(4):
            await stage.watch.poll()
        await goes_on(end)
        assert stage.listed() == {NODE_ID}
    assert failure(stage.hub, revoked) is Failure.ATTESTATION_FAILED
    with pytest.raises(TokenError, match="revoked"):
        stage.hub.authenticator.identify(void)
    stage.hub.authenticator.identify(good)
    assert stage.hub.fleet.names.label_of(NODE_ID) == "greenhouse pi"
    (line,) = stage.hub.lines.entries("a change cannot be read")
    assert line["what"] == SOURCE[name]
    assert line["level"] == "error"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param("ca/ledger.jsonl", torn, id="the CA's ledger"),
        pytest.param("ca/root.pem", emptied, id="the root"),
        pytest.param("revoked_tokens.jsonl", torn, id="the list of tokens"),
        pytest.param("token_keys.jsonl", torn, id="the keys of tokens"),
        pytest.param("node_names.jsonl", torn, id="the nodes' names"),
    ],
)
async def test_when_a_ledger_cannot_be_read_for_three_seconds_calls_are_refused_until_it_can(
    stage: Stage, name: str, damage: Callable[[Path], None]
) -> None:
    node = stage.real.node()
    stage.keys.add(TOKEN_KEY, NOW_MS)
    stage.revoke_token("jti-1")
    stage.label(NODE_ID, "greenhouse pi")
    result = {"message": "ping", "received_at_ms": stage.hub.clock(), "node_id": NODE_ID}

    async def goes_through(end: NodeEnd) -> None:
        calling = stage.call(node)
        await end.acknowledge(await end.receive("cmd"), result)
        assert await code_of(calling) == "ok"

    path = stage.directory / name
    whole = path.read_bytes()
    async with stage.session(node) as end:
        await stage.watch.poll()
        damage(path)
        stage.hub.seconds.now += 2.9
        await stage.watch.poll()
        await goes_through(end)
        stage.hub.seconds.now += 0.1
        await stage.watch.poll()
        await stage.watch.poll()
        assert not stage.hub.freshness.is_fresh()
        assert await code_of(stage.call(node)) == "E_INTERNAL"
        principal = stage.hub.authenticator.identify(stage.hub.token())
        with pytest.raises(ToolError, match="cannot read what has been revoked"):
            stage.gateway.charge(principal, 1)  # as for a list of tools, or a resource
        write_atomic(path, whole, 0o600)  # as an editor does
        await stage.watch.poll()
        assert stage.hub.freshness.is_fresh()
        await goes_through(end)
    (line,) = stage.hub.lines.entries("the ledgers cannot be read; calls are refused")
    assert line["level"] == "error"
    assert line["unread"] == [SOURCE[name]]
    assert len(stage.hub.lines.entries("the ledgers can be read again; calls are made")) == 1
    stage.hub.refusals.write()
    [refusals] = [line for line in stage.hub.audited() if line.get("event") == "call_refused"]
    assert (refusals["reason"], refusals["count"]) == ("E_INTERNAL", 2)


async def test_a_ledger_whose_disk_hangs_is_one_that_cannot_be_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.revoke_token("jti-1")
    answers = Event()
    jtis = RevokedTokens.jtis

    def hanging(self: RevokedTokens) -> frozenset[str]:
        assert answers.wait(BOUND_S)
        return jtis(self)

    monkeypatch.setattr(RevokedTokens, "jtis", hanging)
    looking = asyncio.create_task(stage.watch.poll())
    stage.hub.seconds.now += 3
    await asyncio.sleep(0)
    assert not stage.hub.freshness.is_fresh()
    answers.set()
    await asyncio.wait_for(looking, BOUND_S)
    assert stage.hub.freshness.is_fresh()


async def test_a_ledger_that_has_not_changed_counts_without_the_event_loop_and_a_changed_one_does_not(
    stage: Stage,
) -> None:
    await stage.watch.poll()
    stage.hub.seconds.now += 3
    assert not stage.hub.freshness.is_fresh()
    stage.watch.confirm_unchanged()
    assert stage.hub.freshness.is_fresh()
    stage.revoke_token("jti-1")
    stage.hub.seconds.now += 3
    stage.watch.confirm_unchanged()
    assert not stage.hub.freshness.is_fresh()
    await stage.watch.poll()
    assert stage.hub.freshness.is_fresh()


async def test_what_other_relays_have_sent_and_is_not_understood_refuses_calls_until_it_is(
    stage: Stage,
) -> None:
    node = stage.real.node()
    stage.sharing.understands = False
    async with stage.session(node):
        stage.hub.seconds.now += 3
        await stage.poll()
        stage.watch.confirm_unchanged()
        assert await code_of(stage.call(node)) == "E_INTERNAL"
    (line,) = stage.hub.lines.entries("the ledgers cannot be read; calls are refused")
    assert line["unread"] == [SHARED]
    stage.sharing.understands = True
    await stage.watch.poll()
    assert stage.hub.freshness.is_fresh()


async def test_of_every_change_of_a_ledger_the_other_relays_are_told_once(stage: Stage) -> None:
    await stage.poll()
    before = stage.sharing.changes
    stage.revoke_token("jti-1")
    await stage.poll()
    await stage.poll()
    assert stage.sharing.changes == before + 1
    assert stage.sharing.kinds == {"token_revocation"}
    stage.join_tokens.revoke("01HZX9K3M4P7Q8R9S0T1V2W3XY", made_here=False)
    await stage.poll()
    await stage.poll()
    assert stage.sharing.changes == before + 2
    assert stage.sharing.kinds == {"token_revocation", "join_token_revocation", "join_token_use"}


async def test_the_other_relays_are_told_before_a_change_is_read_here_and_once_though_it_cannot_be(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stage.sharing.changes
    stage.revoke_token("jti-1")
    with monkeypatch.context() as patch:

        def unreadable(_self: RevokedTokens) -> frozenset[str]:
            assert stage.sharing.changes == before + 1
            raise LedgerError("planted")

        patch.setattr(RevokedTokens, "jtis", unreadable)
        await stage.watch.poll()
        await stage.watch.poll()
    assert stage.hub.lines.entries("a change cannot be read")[0]["reason"] == "planted"
    await stage.watch.poll()
    assert stage.events() == [{"event": "token_revoked", "jti": "jti-1"}]
    assert stage.sharing.changes == before + 1


async def test_ledgers_are_looked_at_while_the_event_loop_is_held_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = stage.watching(interval_s=0.001)
    watch.begin()
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    counted = Event()

    def read(name: str) -> None:
        if name == WatchedLeaves.name:
            counted.set()

    monkeypatch.setattr(stage.hub.freshness, "read", read)
    assert counted.wait(BOUND_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_ca_that_was_restored_from_an_older_backup_readmits_no_node(stage: Stage) -> None:
    node = stage.real.node()
    stage.hub.announce(node)
    ledger = stage.directory / "ca" / "ledger.jsonl"
    before = ledger.read_bytes()
    stage.real.as_operator().revoke(NODE_ID)
    await stage.watch.poll()
    write_atomic(ledger, before, 0o600)
    await stage.watch.poll()
    stage.hub.announce(node, issued_at_ms=stage.hub.clock.advance(1))
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED
    (line,) = stage.hub.lines.entries("revoked certificates are missing from the ledger")
    assert (line["level"], line["count"]) == ("error", 1)


async def test_what_could_not_be_read_for_a_moment_takes_effect_as_soon_as_it_can(stage: Stage) -> None:
    node = stage.real.node()
    stage.hub.announce(node)
    await stage.watch.poll()
    stage.real.as_operator().revoke(NODE_ID)
    ledger = stage.directory / "ca" / "ledger.jsonl"
    whole = ledger.read_bytes()
    in_the_way = ledger.rename(ledger.with_suffix(".aside"))
    ledger.mkdir()  # there, but not to be read
    await stage.watch.poll()
    assert failure(stage.hub, node) is None
    ledger.rmdir()
    in_the_way.rename(ledger)  # the same file as before, not changed again
    await stage.watch.poll()
    assert ledger.read_bytes() == whole
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED


async def test_a_look_that_fails_is_tried_again_without_another_change(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = stage.real.node()
    stage.hub.announce(node)
    await stage.watch.poll()
    stage.real.as_operator().revoke(NODE_ID)
    with monkeypatch.context() as patch:

        def no_descriptor() -> frozenset[str]:
            raise OSError(24, "Too many open files")

        patch.setattr(stage.real.ca, "revoked_kids", no_descriptor)
        await stage.watch.poll()
        assert failure(stage.hub, node) is None
    await stage.watch.poll()
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED


async def test_a_part_that_does_not_follow_yet_holds_up_no_revocation(stage: Stage) -> None:
    began = asyncio.Queue[None]()

    async def never_done() -> bool:
        began.put_nowait(None)
        await asyncio.Event().wait()
        return True

    watch = stage.watching(never_done, interval_s=0)
    watch.begin()
    task = asyncio.create_task(watch.run())
    await asyncio.wait_for(began.get(), BOUND_S)
    node = stage.real.node()
    stage.hub.announce(node)
    stage.real.as_operator().revoke(NODE_ID)
    async with asyncio.timeout(BOUND_S):
        while failure(stage.hub, node) is not Failure.ATTESTATION_FAILED:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_event_loop_goes_on_while_the_ledgers_are_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = stage.real.node()
    stage.hub.announce(node)
    stage.real.as_operator().revoke(NODE_ID)
    stage.revoke_token("jti-1")
    read_on = Event()
    revoked_kids = stage.real.ca.revoked_kids

    def slow() -> frozenset[str]:
        assert read_on.wait(BOUND_S)
        return revoked_kids()

    monkeypatch.setattr(stage.real.ca, "revoked_kids", slow)
    looking = asyncio.create_task(stage.watch.poll())
    async with asyncio.timeout(BOUND_S):  # a token does not wait for the leaves
        while not stage.hub.lines.entries("token_revoked"):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
    assert not looking.done()
    assert failure(stage.hub, node) is None
    read_on.set()
    await asyncio.wait_for(looking, BOUND_S)
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED


async def test_those_who_wait_for_the_ca_on_threads_hold_up_no_revocation(stage: Stage) -> None:
    node = stage.real.node()
    stage.hub.announce(node)
    stage.real.as_operator().revoke(NODE_ID)
    free = Event()
    waiting = [asyncio.create_task(asyncio.to_thread(free.wait, BOUND_S)) for _ in range(40)]
    await asyncio.sleep(0)
    await asyncio.wait_for(stage.watch.poll(), BOUND_S)
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED
    assert not any(task.done() for task in waiting)
    free.set()
    await asyncio.gather(*waiting)


async def test_a_revocation_takes_effect_though_the_audit_cannot_be_written_and_is_recorded_when_it_can(
    stage: Stage,
) -> None:
    first, second, last = stage.real.node(), stage.real.node(OTHER_NODE_ID), stage.real.node(THIRD_NODE_ID)
    stage.hub.announce(first)
    for node in (first, second):
        stage.real.as_operator().revoke(node.node_id)
        with full_disk(0):
            await stage.watch.poll()
            await stage.watch.poll()
        assert failure(stage.hub, first) is Failure.ATTESTATION_FAILED
    assert stage.events() == []
    stage.real.as_operator().revoke(THIRD_NODE_ID)
    await stage.watch.poll()
    kids = [node.kid for node in (first, second, last)]
    assert stage.events() == [{"event": "leaf_revoked", "kid": kid} for kid in kids]
    (line,) = stage.hub.lines.entries("not recorded")
    assert (line["level"], line["what"]) == ("error", {"event": "leaf_revoked", "kid": first.kid})
    await stage.watch.poll()
    assert len(stage.events()) == 3


async def test_not_more_than_so_much_waits_to_be_recorded_and_what_is_left_out_is_in_the_log(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.server.decision_records.MAX_UNRECORDED", 1)
    for jti in ("jti-1", "jti-2"):
        stage.revoke_token(jti)
    with full_disk(0):
        await stage.watch.poll()
    assert [line["what"]["jti"] for line in stage.hub.lines.entries("not recorded")] == ["jti-2", "jti-1"]
    await stage.watch.poll()
    assert stage.events() == [{"event": "token_revoked", "jti": "jti-1"}]


# --- names --------------------------------------------------------------------------------------------


async def test_what_the_operator_calls_a_node_is_in_effect_at_the_next_poll(stage: Stage) -> None:
    names = stage.hub.fleet.names
    stage.hub.announce(stage.real.node())
    stage.label(NODE_ID, "greenhouse pi")
    await stage.watch.poll()
    assert names.resolve(TENANT, "greenhouse pi") == NODE_ID
    stage.label(NODE_ID, "barn")
    await stage.watch.poll()
    await stage.watch.poll()
    assert names.label_of(NODE_ID) == "barn"
    assert len(stage.hub.lines.entries("node named")) == 2


async def test_a_node_that_is_revoked_is_in_no_list_and_one_that_is_forgotten_is_not_known(
    stage: Stage,
) -> None:
    node, other = stage.real.node(), stage.real.node(OTHER_NODE_ID)
    stage.hub.announce(node)
    stage.hub.announce(other)
    stage.label(NODE_ID, "greenhouse pi")
    stage.real.as_operator().revoke(NODE_ID)
    await stage.watch.poll()
    assert [each.node_id for each in stage.hub.fleet.nodes_of(TENANT)] == [OTHER_NODE_ID]
    assert stage.hub.fleet.tenant_of(NODE_ID) is not None
    NameLedger(stage.directory / "node_names.jsonl", stage.hub.clock).forget(NODE_ID)
    await stage.watch.poll()
    assert stage.hub.fleet.tenant_of(NODE_ID) is None
    assert stage.hub.fleet.names.label_of(NODE_ID) == ""
    assert failure(stage.hub, node) is Failure.SAFETY_DENIED
    stage.hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert stage.hub.fleet.tenant_of(NODE_ID) is None
    again = stage.real.node(key=key_named("another key"), replace=True)
    await stage.watch.poll()
    stage.hub.announce(again, issued_at_ms=stage.hub.clock.advance(1))
    assert failure(stage.hub, again) is None
    await stage.watch.poll()
    assert {each.node_id for each in stage.hub.fleet.nodes_of(TENANT)} == {NODE_ID, OTHER_NODE_ID}


async def test_a_node_that_is_forgotten_while_its_session_ends_is_forgotten_after_it(stage: Stage) -> None:
    async with stage.session(stage.real.node()) as end:
        stage.real.as_operator().revoke(NODE_ID)
        NameLedger(stage.directory / "node_names.jsonl", stage.hub.clock).forget(NODE_ID)
        await stage.watch.poll()
        assert (await end.until_closed())[0] == 4003
        assert stage.hub.fleet.tenant_of(NODE_ID) is None


async def test_names_survive_a_restart(stage: Stage) -> None:
    stage.label(NODE_ID, "greenhouse pi")
    stage.watching().begin()
    assert stage.hub.fleet.names.label_of(NODE_ID) == "greenhouse pi"


async def test_names_that_were_given_before_a_start_are_not_logged_at_it(stage: Stage) -> None:
    stage.label(NODE_ID, "greenhouse pi")
    stage.watching().begin()
    assert stage.hub.lines.entries("node named") == []


# --- from the beginning -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "damage", "error"),
    [
        pytest.param("ca/ledger.jsonl", torn, AuthorityError, id="the ledger"),
        pytest.param("ca/ledger.jsonl", made_strange, AuthorityError, id="an unknown entry"),
        pytest.param("ca/root.pem", removed, AuthorityError, id="the root"),
        pytest.param("revoked_tokens.jsonl", torn, LedgerError, id="the list of tokens"),
        pytest.param("node_names.jsonl", torn, LedgerError, id="the nodes' names"),
    ],
)
async def test_a_relay_that_cannot_know_who_is_revoked_does_not_begin(
    stage: Stage, name: str, damage: Callable[[Path], None], error: type[Exception]
) -> None:
    stage.real.node()
    stage.revoke_token("jti-1")
    stage.label(NODE_ID, "greenhouse pi")
    damage(stage.directory / name)
    with pytest.raises(error):
        stage.watching().begin()


async def test_revocations_survive_a_restart(
    stage: Stage, registry: SchemaRegistry, reader: FrameReader
) -> None:
    node, good = stage.real.node(), stage.real.node(OTHER_NODE_ID)
    void = stage.hub.token()
    stage.revoke_token(stage.hub.authenticator.identify(void).jti)
    stage.real.as_operator().revoke(NODE_ID)
    (stage.directory / "again").mkdir()
    hub = Hub(stage.directory / "again", registry)
    (stage.directory / "ca").rename(stage.directory / "again" / "ca.before")
    again = Stage(hub, stage.directory / "again", None, reader)
    (stage.directory / "again" / "ca").rename(stage.directory / "again" / "ca.unused")
    (stage.directory / "again" / "ca.before").rename(stage.directory / "again" / "ca")
    (stage.directory / "revoked_tokens.jsonl").rename(stage.directory / "again" / "revoked_tokens.jsonl")
    again.watch.begin()
    await again.poll()
    for each in (node, good):
        hub.announce(each)
    assert (failure(hub, good), again.leaves_looked_at) == (None, 1)
    assert failure(hub, node) is not None
    with pytest.raises(TokenError, match="revoked"):
        hub.authenticator.identify(void)
    await again.watch.poll()
    assert again.events() == []  # it was recorded when it happened
    again.close()
    hub.close()


async def test_it_looks_again_and_again_until_it_is_cancelled(stage: Stage) -> None:
    watch = stage.watching(interval_s=0)
    watch.begin()
    task = asyncio.create_task(watch.run())
    for node in (stage.real.node(), stage.real.node(OTHER_NODE_ID)):
        stage.hub.announce(node)
        stage.real.as_operator().revoke(node.node_id)
        async with asyncio.timeout(BOUND_S):
            while failure(stage.hub, node) is not Failure.ATTESTATION_FAILED:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- the keys of tokens ---------------------------------------------------------------------------------


async def test_a_key_that_is_added_is_accepted_and_recorded_and_those_before_it_end(stage: Stage) -> None:
    stage.keys.add(TOKEN_KEY, NOW_MS)
    await stage.watch.poll()
    assert [*stage.accepted] == [key_id(TOKEN_KEY)]
    stage.keys.add(NEXT_TOKEN_KEY, stage.hub.clock() + 1)
    changes = stage.sharing.changes
    await stage.watch.poll()
    assert {*stage.accepted} == {key_id(TOKEN_KEY), key_id(NEXT_TOKEN_KEY)}
    assert stage.sharing.changes == changes + 1
    stage.hub.clock.advance(1)
    assert [*stage.accepted] == [key_id(NEXT_TOKEN_KEY)]
    assert stage.events() == [
        {"event": "token_key_accepted", "kid": key_id(key)} for key in (TOKEN_KEY, NEXT_TOKEN_KEY)
    ]


async def test_keys_end_with_the_last_root_that_vouches_for_them(stage: Stage) -> None:
    stage.keys.add(TOKEN_KEY, NOW_MS)
    await stage.watch.poll()
    until_ms = stage.real.as_operator().rotate_root(overlap_days=1)
    stage.hub.clock.advance(until_ms - stage.hub.clock())
    # The roots are read by one poll, and the keys by the next.
    await stage.watch.poll()
    await stage.watch.poll()
    assert [*stage.accepted] == []
