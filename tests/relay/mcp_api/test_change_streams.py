"""Streams over the SDK's own connections, without a transport below them."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import mcp_types as types
import pytest
from mcp.server.connection import Connection
from mcp.server.session import ServerSession
from mcp.shared.exceptions import MCPError

from relay.auth.agent_tokens import CALLER_IN_SCOPE, AgentName, Caller, Principal
from relay.fleet.change_notifier import ChangeNotifier, Listener
from relay.fleet.fleet import GRACE_MS
from relay.fleet.node_record import Where
from relay.fleet.selection import WHOLE_FLEET
from relay.mcp_api.change_streams import (
    FOLLOWED_PER_AGENT,
    MAX_FOLLOWED,
    TOO_MANY_STREAMS,
    ChangeStreams,
    FollowedResources,
    OpenStreams,
    StreamLimitError,
)
from relay.mcp_api.sdk import Context
from relay.streams.telemetry.resource import TelemetryResource
from schemas.labels import NodeName
from schemas.manifest import etag_of
from schemas.registry import SchemaRegistry
from schemas.tally import Tally
from tests.fakes.callers import principal
from tests.fakes.followed import URI, Followed
from tests.fakes.hub import Hub
from tests.fakes.signer import ECHO, METRICS, NODE_ID, OTHER_NODE_ID, TENANT, TTL_MS

BOUND_S: Final = 30

CHANGED: Final = "notifications/tools/list_changed"


class Outbound:
    """The way to one client: notes the notifications that take it."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[str] = asyncio.Queue()

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: Any = None) -> None:  # noqa: ARG002 - the SDK's signature
        self.sent.put_nowait(method)

    async def next(self) -> str:
        return await asyncio.wait_for(self.sent.get(), BOUND_S)


class Notifier(ChangeNotifier):
    """Counts its listeners; ``stopped`` is set when one has stopped."""

    listeners = 0

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub.fleet, hub.log, interval_s=0.001)
        self.stopped = asyncio.Event()

    def listen(self, rights: Any, listener: Listener, selection: Any = WHOLE_FLEET) -> Callable[[], None]:
        self.listeners += 1
        stop = super().listen(rights, listener, selection)
        calls = itertools.count()

        def stop_once() -> None:
            if next(calls) == 0:
                self.listeners -= 1
            stop()
            self.stopped.set()

        return stop_once


class Stage:
    """The streams of a relay on which each agent may hold one."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.notifier = Notifier(hub)
        self.streams = ChangeStreams(
            self.notifier,
            TelemetryResource(hub.telemetry, hub.fleet),
            OpenStreams(per_agent=1),
            hub.options,
            hub.judged_by,
        )

    def principal(self, **token: Any) -> Principal:
        return self.hub.authenticator.identify(self.hub.token(**token))

    def context(self, principal: Principal, connection: Connection) -> Context:
        outbound: Any = connection.outbound
        session = ServerSession(outbound, connection)
        request: Any = SimpleNamespace(scope={CALLER_IN_SCOPE: Caller(principal, "http", {})})
        return Context(
            session=session,
            lifespan_context=None,
            protocol_version=connection.protocol_version,
            method="",
            request_id=1,
            request=request,
        )

    @asynccontextmanager
    async def session(self, principal: Principal, *, ready: bool = True) -> AsyncIterator[Outbound]:
        """Hold a session of the old era, as the endpoint does."""
        outbound: Any = Outbound()
        connection = Connection.for_loop(outbound)
        async with connection.exit_stack:
            context = self.context(principal, connection)
            self.streams.count_session(context)
            self.streams.count_session(context)
            if ready:
                self.streams.follow_session(context)
                self.streams.follow_session(context)
            yield outbound

    def listening(
        self, principal: Principal, outbound: Any, **wanted: object
    ) -> "asyncio.Task[types.SubscriptionsListenResult]":
        """Return the task of a subscription of the new era, by default to changes of the tools."""
        connection = Connection.from_envelope("2026-07-28", None, None, outbound=outbound)
        params = types.SubscriptionsListenRequestParams.model_validate(
            {
                "notifications": wanted or {"toolsListChanged": True},
                "_meta": {types.PROTOCOL_VERSION_META_KEY: "2026-07-28"},
            }
        )
        return asyncio.create_task(self.streams.listen(self.context(principal, connection), params))

    def change(self) -> None:
        self.hub.connect(self.hub.ca.issue(OTHER_NODE_ID))


@pytest.fixture
async def stage(hub: Hub) -> AsyncIterator[Stage]:
    stage = Stage(hub)
    running = asyncio.create_task(stage.notifier.run())
    yield stage
    running.cancel()
    await asyncio.wait([running])


# --- sessions of the old era --------------------------------------------------------------------------


async def test_a_session_that_is_not_ready_is_not_notified(stage: Stage) -> None:
    async with stage.session(stage.principal(), ready=False):
        assert stage.notifier.listeners == 0


async def test_a_session_is_no_longer_notified_when_its_token_expires(stage: Stage) -> None:
    principal = stage.principal(ttl_s=1)
    stage.hub.clock.advance(1000)  # between its request and this
    async with stage.session(principal):
        await asyncio.wait_for(stage.notifier.stopped.wait(), BOUND_S)
        assert stage.notifier.listeners == 0


# --- subscriptions of the new era ---------------------------------------------------------------------


async def test_a_subscription_is_acknowledged_notified_and_takes_a_place(stage: Stage) -> None:
    client, principal = Outbound(), stage.principal()
    listening = stage.listening(principal, client)
    assert await client.next() == "notifications/subscriptions/acknowledged"
    stage.change()
    assert await client.next() == CHANGED
    with pytest.raises(MCPError, match=TOO_MANY_STREAMS):
        await stage.listening(principal, Outbound())
    listening.cancel()
    await asyncio.wait([listening])
    assert stage.notifier.listeners == 0
    stage.streams.open_session(principal)()


# --- what is a change, in both eras -------------------------------------------------------------------


def comes(stage: Stage) -> None:
    stage.hub.connect(stage.hub.ca.issue(NODE_ID))


def goes(stage: Stage) -> None:
    stage.hub.fleet.connection_changed(OTHER_NODE_ID, Where.NOWHERE)
    stage.hub.clock.advance(GRACE_MS)


def loses_a_capability(stage: Stage) -> None:
    announces_again(stage, [ECHO])


def gains_a_capability(stage: Stage) -> None:
    announces_again(stage, [METRICS, ECHO, {**ECHO, "cap_id": "more"}])


def expires(stage: Stage) -> None:
    stage.hub.clock.advance(TTL_MS)


def is_revoked(stage: Stage) -> None:
    stage.hub.fleet.drop_leaves(lambda leaf: leaf.node_id == OTHER_NODE_ID)
    stage.notifier.wake()


def is_labelled(stage: Stage) -> None:
    stage.hub.fleet.rename({OTHER_NODE_ID: NodeName(TENANT, "greenhouse pi")})


def announces_again(stage: Stage, capabilities: list[Mapping[str, Any]]) -> None:
    node = stage.hub.ca.issue(OTHER_NODE_ID)
    stage.hub.announce(node, issued_at_ms=stage.hub.clock.advance(1), capabilities=capabilities)


def beats(stage: Stage) -> None:
    """Send what a node sends with each heartbeat: a renewed manifest, and the heartbeat."""
    node = stage.hub.ca.issue(OTHER_NODE_ID)
    wire = stage.hub.announce(node, issued_at_ms=stage.hub.clock.advance(60_000))
    stage.hub.fleet.inventory.heartbeat(OTHER_NODE_ID, etag_of(wire))


def is_superseded(stage: Stage) -> None:
    """Lose the session and open the next one at once, as a node that reconnects."""
    for connected in (False, True):
        stage.hub.fleet.connection_changed(OTHER_NODE_ID, Where.HERE if connected else Where.NOWHERE)


@asynccontextmanager
async def notified(stage: Stage, era: str) -> AsyncIterator[Outbound]:
    """Hold a client of ``era`` that is notified of changes."""
    principal = stage.principal()
    if era == "2025":
        async with stage.session(principal) as client:
            yield client
        assert stage.notifier.listeners == 0
        return
    client = Outbound()
    listening = stage.listening(principal, client)
    assert await client.next() == "notifications/subscriptions/acknowledged"
    yield client
    listening.cancel()
    await asyncio.wait([listening])
    assert stage.notifier.listeners == 0


@pytest.mark.parametrize("era", ["2025", "2026"])
@pytest.mark.parametrize(
    "change", [comes, goes, loses_a_capability, gains_a_capability, expires, is_revoked, is_labelled]
)
async def test_each_kind_of_change_is_notified_once(
    stage: Stage, era: str, change: Callable[[Stage], None]
) -> None:
    stage.change()
    async with notified(stage, era) as client:
        change(stage)
        assert await client.next() == CHANGED
        # What follows is notified by itself: the change before it was notified once.
        stage.hub.connect(stage.hub.ca.issue("01hzx9k3m4p7q8r9s0t1v2w3x0"), issued_at_ms=stage.hub.clock())
        assert await client.next() == CHANGED
        assert client.sent.empty()


@pytest.mark.parametrize("era", ["2025", "2026"])
async def test_neither_a_heartbeat_nor_a_new_session_of_a_node_is_a_change(stage: Stage, era: str) -> None:
    stage.change()
    async with notified(stage, era) as client:
        for _ in range(3):
            beats(stage)
            is_superseded(stage)
        stage.hub.connect(stage.hub.ca.issue(NODE_ID), issued_at_ms=stage.hub.clock())
        assert await client.next() == CHANGED
        assert client.sent.empty()


# --- resources ----------------------------------------------------------------------------------------

UPDATED: Final = "notifications/resources/updated"


class FollowedStage(Stage):
    """The same over nodes that a test plays."""

    def __init__(self, followed: Followed) -> None:
        super().__init__(followed.hub)
        self.followed = followed
        self.streams = ChangeStreams(
            self.notifier, followed.resource, OpenStreams(), self.hub.options, self.hub.judged_by
        )
        self.agent = followed.agent()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[tuple[Outbound, Callable[[str, str], None]]]:
        """Hold a session of the old era, and what sends a request of it for a resource."""
        outbound: Any = Outbound()
        connection = Connection.for_loop(outbound)
        async with connection.exit_stack:
            self.streams.count_session(self.context(self.agent, connection))

            def ask(method: str, uri: str) -> None:
                context = replace(self.context(self.agent, connection), method=method, params={"uri": uri})
                self.streams.subscribe(context)

            yield outbound, ask

    def listening_to(self, outbound: Any, *uris: str) -> "asyncio.Task[types.SubscriptionsListenResult]":
        return self.listening(self.agent, outbound, resourceSubscriptions=list(uris))


@pytest.fixture
def followed_stage(tmp_path: Path, registry: SchemaRegistry) -> FollowedStage:
    return FollowedStage(Followed(tmp_path, registry))


async def test_a_session_follows_a_resource_until_it_unsubscribes(followed_stage: FollowedStage) -> None:
    followed = followed_stage.followed
    async with followed_stage.following() as (client, ask):
        await followed.subscribe(followed_stage.agent)
        for _ in range(2):
            ask("resources/subscribe", URI)
        followed.sample()
        assert await client.next() == UPDATED
        ask("resources/unsubscribe", URI)
        assert followed.counted("telemetry_subscriptions") == 0
        ask("resources/unsubscribe", URI)


@pytest.mark.parametrize("uri", ["fleet://nodes", f"node://{NODE_ID}/manifest", "node://nowhere/telemetry"])
async def test_what_does_not_change_cannot_be_followed(followed_stage: FollowedStage, uri: str) -> None:
    async with followed_stage.following() as (_, ask):
        with pytest.raises(MCPError, match="cannot be followed"):
            ask("resources/subscribe", uri)


@pytest.mark.parametrize("how", ["the end of the session", "the revocation of the token"])
async def test_what_a_session_follows_ends_with_it(followed_stage: FollowedStage, how: str) -> None:
    followed = followed_stage.followed
    async with followed_stage.following() as (client, ask):
        ask("resources/subscribe", URI)
        await followed.subscribe(followed_stage.agent)
        if how == "the revocation of the token":
            followed_stage.streams.revoke({followed_stage.agent.jti})
            assert followed.counted("telemetry_subscriptions") == 0
            followed.sample()
            assert client.sent.empty()
    assert followed.counted("telemetry_subscriptions") == 0


@pytest.mark.parametrize("ended", [False, True])
async def test_a_session_follows_by_the_token_that_its_owner_uses_now(
    followed_stage: FollowedStage,
    ended: bool,  # noqa: FBT001 - the first token, before the next was used
) -> None:
    followed, streams, agent = followed_stage.followed, followed_stage.streams, followed_stage.agent
    outbound: Any = Outbound()
    connection = Connection.for_loop(outbound)
    async with connection.exit_stack:
        context = replace(followed_stage.context(agent, connection), method="resources/subscribe")
        streams.subscribe(replace(context, params={"uri": URI}))
        if ended:
            streams.revoke({agent.jti})
        for nodes, is_told in ((None, True), ([OTHER_NODE_ID], False), (None, True)):
            streams.renew(connection, followed.agent(nodes=nodes))
            await followed.subscribe(agent)
            followed.sample()
            if is_told:
                assert await outbound.next() == UPDATED
    assert outbound.sent.empty()


async def test_what_the_next_token_takes_over_is_counted_once(followed_stage: FollowedStage) -> None:
    followed, agent = followed_stage.followed, followed_stage.agent
    outbound: Any = Outbound()
    connection = Connection.for_loop(outbound)
    async with connection.exit_stack, followed_stage.following() as (_, ask_of_another):
        for uri in capabilities(MAX_FOLLOWED):
            ask_of_another("resources/subscribe", uri)
        context = replace(followed_stage.context(agent, connection), method="resources/subscribe")
        for uri in (URI, *capabilities(FOLLOWED_PER_AGENT - MAX_FOLLOWED - 1)):
            followed_stage.streams.subscribe(replace(context, params={"uri": uri}))
        followed_stage.streams.renew(connection, followed.agent())
        await followed.subscribe(agent)
        followed.sample()
        assert await outbound.next() == UPDATED


async def test_a_subscription_of_the_new_era_follows_resources_until_it_is_closed(
    followed_stage: FollowedStage,
) -> None:
    followed, client = followed_stage.followed, Outbound()
    listening = followed_stage.listening_to(client, URI, "fleet://nodes")
    assert await client.next() == "notifications/subscriptions/acknowledged"
    await followed.subscribe(followed_stage.agent)
    for _ in range(2):
        followed.sample()
        assert await client.next() == UPDATED
    followed_stage.change()
    listening.cancel()
    await asyncio.wait([listening])
    assert client.sent.empty()  # it has not asked for changes of the tools
    assert followed.counted("telemetry_subscriptions") == 0


async def test_a_client_that_does_not_read_gets_one_update_for_all_that_it_missed(
    followed_stage: FollowedStage,
) -> None:
    class Slow(Outbound):
        def __init__(self) -> None:
            super().__init__()
            self.reads = asyncio.Event()

        async def notify(self, method: str, params: Mapping[str, Any] | None, opts: Any = None) -> None:
            await super().notify(method, params, opts)
            await self.reads.wait()

    followed, client = followed_stage.followed, Slow()
    listening = followed_stage.listening_to(client, URI)
    await followed.subscribe(followed_stage.agent)
    assert await client.next() == "notifications/subscriptions/acknowledged"
    for _ in range(2000):
        followed.sample()
    client.reads.set()
    assert await client.next() == UPDATED
    followed.sample()
    assert await client.next() == UPDATED
    assert client.sent.empty()
    listening.cancel()
    await asyncio.wait([listening])


def nothing() -> None:
    pass


class Ends:
    """Notes whose stream was ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def of(self, name: str) -> Callable[[], None]:
        return lambda: self.ended.append(name)


def may_open(streams: OpenStreams, who: Principal) -> bool:
    try:
        streams.check(who)
    except StreamLimitError:
        return False
    return True


# --- shares -------------------------------------------------------------------------------------------


def test_there_is_room_for_so_many_in_all() -> None:
    streams = OpenStreams(per_agent=10, in_all=3)
    releases = [streams.hold(principal(sub=f"agent-{number}"), nothing) for number in range(3)]
    assert not may_open(streams, principal(sub="a newcomer"))
    releases[1]()
    assert may_open(streams, principal(sub="a newcomer"))


def test_what_is_closed_gives_its_place_back_once() -> None:
    streams = OpenStreams(per_agent=2)
    first, _second = streams.hold(principal(), nothing), streams.hold(principal(), nothing)
    for _ in range(3):
        first()
    streams.hold(principal(), nothing)
    assert not may_open(streams, principal())


def test_who_holds_nothing_is_forgotten() -> None:
    streams = OpenStreams()
    for number in range(100):
        streams.check(principal(sub=f"agent-{number}", jti=f"jti-{number}"))
        streams.hold(principal(sub=f"agent-{number}", jti=f"jti-{number}"), nothing)()
    assert (len(streams._held), len(streams._ends)) == (0, 0)  # noqa: SLF001 - a leak shows nowhere else


# --- revocation ---------------------------------------------------------------------------------------


def test_what_a_token_opened_ends_when_it_is_revoked_and_nothing_else() -> None:
    streams, ends = OpenStreams(), Ends()
    for name, jti in (("first", "jti-1"), ("second", "jti-1"), ("other", "jti-2")):
        streams.hold(principal(jti=jti), ends.of(name))
    streams.revoke(frozenset({"jti-1", "never seen"}))
    assert ends.ended == ["first", "second"]


def test_a_stream_that_closes_as_it_is_ended_gives_its_place_back() -> None:
    streams = OpenStreams(per_agent=2)
    releases: list[Callable[[], None]] = []
    for _ in range(2):
        number = len(releases)
        releases.append(streams.hold(principal(), lambda number=number: releases[number]()))  # type: ignore[misc]
    assert not may_open(streams, principal())
    streams.revoke({"jti-1"})
    streams.revoke({"jti-1"})
    streams.hold(principal(), nothing)
    assert may_open(streams, principal())


@pytest.fixture
def followed(tmp_path: Path, registry: SchemaRegistry) -> Followed:
    return Followed(tmp_path, registry)


class Streams:
    """The streams of agents that follow resources of one relay."""

    def __init__(self, followed: Followed) -> None:
        self.followed = followed
        self.held = Tally[AgentName]()

    def opened(
        self, agent: Principal | None = None, updated: Callable[[str], None] = lambda _: None
    ) -> FollowedResources:
        agent = agent or self.followed.agent()
        return FollowedResources(self.followed.resource, agent, updated, self.held)


@pytest.fixture
def streams(followed: Followed) -> Streams:
    return Streams(followed)


def capabilities(count: int) -> list[str]:
    return [f"{URI}?cap=c{number}" for number in range(count)]


async def test_updates_carry_the_uri_that_was_followed(followed: Followed, streams: Streams) -> None:
    agent, updated = followed.agent(), list[str]()
    resources = streams.opened(agent, updated.append)
    query = f"{URI}?cap=sysmetrics"
    assert [resources.add(uri) for uri in (URI, URI, query, "fleet://nodes")] == [True, True, True, False]
    await followed.subscribe(agent)
    followed.sample()
    assert updated == [URI, query]
    resources.remove(URI)
    resources.remove(URI)
    followed.sample()
    assert updated == [URI, query, query]
    resources.close()
    assert followed.counted("telemetry_subscriptions") == 0


async def test_a_resource_is_followed_once_however_it_is_spelled(
    followed: Followed, streams: Streams
) -> None:
    agent, updated = followed.agent(), list[str]()
    resources = streams.opened(agent, updated.append)
    spellings = [f"node://{NODE_ID[:length]}/telemetry" for length in range(6, 27)]
    spellings += [f"node://%{ord(NODE_ID[0]):02X}{NODE_ID[1:]}/telemetry", f"{URI}?since_ms=5", f"{URI}?"]
    assert all(resources.add(uri) for uri in spellings)
    await followed.subscribe(agent)
    followed.sample()
    assert updated == spellings[:1]
    resources.remove(spellings[-1])
    assert followed.counted("telemetry_subscriptions") == 0
    assert not streams.held


def test_what_was_followed_by_a_label_can_be_ended_by_it_when_it_names_another_node(
    followed: Followed, streams: Streams
) -> None:
    fleet, uri = followed.hub.fleet, "node://greenhouse/telemetry"
    fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse")})
    resources = streams.opened()
    assert resources.add(uri)
    fleet.rename({NODE_ID: NodeName(TENANT, "shed")})
    resources.remove(uri)
    assert not streams.held


def test_the_number_of_resources_is_limited(streams: Streams) -> None:
    resources, uris = streams.opened(), capabilities(MAX_FOLLOWED + 1)
    assert [resources.add(uri) for uri in uris] == [True] * MAX_FOLLOWED + [False]
    resources.close()
    assert resources.add(uris[-1])


def test_the_number_that_one_agent_follows_by_all_of_its_streams_is_limited(
    followed: Followed, streams: Streams
) -> None:
    opened = [streams.opened() for _ in range(64)]
    followed_by_one = [resources.add(uri) for resources in opened for uri in capabilities(MAX_FOLLOWED)]
    assert followed_by_one.count(True) == FOLLOWED_PER_AGENT
    assert streams.opened(followed.agent("agent-2")).add(URI)
    opened[0].close()
    assert opened[-1].add(URI)
