"""A relay that watches its CA and its other ledgers, and what damages their files."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from relay.auth.agent_tokens import AcceptedKeys
from relay.auth.permissions import Rights
from relay.calls.results import CallAnswer
from relay.fleet.change_notifier import ChangeNotifier
from relay.server.decisions import Follow, FollowUps
from relay.state.join_tokens import JoinTokens
from relay.state.names import NameLedger
from relay.state.seal import FleetSeal
from relay.state.tokens import RevokedTokens, TokenKeys
from relay.state.watcher import DescriptorReserve, Watcher
from schemas.errors import Failure, ToolError
from schemas.frames import FrameReader
from tests.fakes.callers import call_of
from tests.fakes.frames import PAYLOADS
from tests.fakes.hub import Hub
from tests.fakes.node_end import NodeEnd
from tests.fakes.real_ca import RealCa
from tests.fakes.serving import Server
from tests.fakes.signer import TENANT, SimulatedNode, key_named

BOUND_S = 30
READERS = Rights(TENANT, frozenset({"read_only"}))
TOKEN_KEY, NEXT_TOKEN_KEY = (bytes(key_named(f"token key {number}").verify_key) for number in (1, 2))


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
        hub.authority = self.real.ca
        self.keys = hub.token_keys = TokenKeys(directory / "token_keys.jsonl", self.real.ca, hub.clock)
        self.accepted = hub.accepted_keys = AcceptedKeys(hub.clock)
        self.join_tokens = hub.join_tokens = JoinTokens(
            directory / "join_tokens.jsonl", hub.clock, os.urandom
        )
        hub.name_ledger = NameLedger(directory / "node_names.jsonl", hub.clock)
        hub.revoked_tokens = RevokedTokens(directory / "revoked_tokens.jsonl")
        hub.fleet_seal = FleetSeal(directory / "cluster_seal.jsonl", self.real.ca)
        self.reserve = hub.reserve = DescriptorReserve(1)
        self.sharing = hub.sharing = Shared()
        self.sessions = hub.sessions(authority=self.real.ca)
        self.notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=1000)
        self.gateway = hub.gateway(self.sessions)
        hub.mcp(self.gateway, self.notifier)
        hub.ledgers = hub.open_ledgers()
        self.leaves_looked_at = 0
        self.watch = self.watching()
        self._reader = reader
        self._server = server
        if server is not None:
            server.serve_socket = self.sessions.serve

    def watching(self, *follows: Follow, look_s: float = 1000, poll_s: float = 1000) -> Watcher:
        self.follow_ups = self.hub.follow_ups = FollowUps([self._follow, *follows], retry_s=1000)
        return self.hub.make_watcher(look_s, poll_s)

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
        RevokedTokens(self.directory / "revoked_tokens.jsonl").revoke(jti, now_ms=self.hub.clock())

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


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"{\n")


def emptied(path: Path) -> None:
    path.write_text("")


def made_strange(path: Path) -> None:
    path.write_text('{"action":"forgive","kid":"ab"}\n')


def removed(path: Path) -> None:
    path.unlink()
