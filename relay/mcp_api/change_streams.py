"""What agents are sent unasked: changes, on sessions of the old era and subscriptions of the new; and events.

The events of callers' sessions go, as log messages, on the event stream of an MCP session of the old era,
which its client opens with GET and may close and open again; ``logging/setLevel`` decides whether it gets
them.

Each agent has a limit of open streams, so that one cannot use up the limit of all, and a stream ends with the
token that opened it. What one client is still to be notified of is kept once, however often it changes
meanwhile: so one that does not read loses nothing but repetitions, and what waits for it is bounded. Must not
detect changes, nor choose events: ``relay.fleet.change_notifier`` and ``SessionEvents`` do.
"""

import asyncio
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from typing import Generic, TypeVar

import mcp_types as types
from attrs import define, field
from mcp.server.connection import Connection
from mcp.server.subscriptions import SUBSCRIPTION_ID_META_KEY, ResourceUpdated, ServerEvent, ToolsListChanged
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import event_to_notification
from starlette.types import Message, Send

from relay.auth.agent_tokens import AgentName, Caller, Principal
from relay.calls.envelope import LEVELS_WITH_INFO
from relay.calls.stream_port import LEVEL, NodeTelemetry, Place, SessionEvents, log_message
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.node_names import UnknownNodeError
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.mcp_api.sdk import Context, caller_of, connection_of
from relay.mcp_api.url_options import UrlOptionError, UrlOptionReader
from schemas.error_roots import PeerError
from schemas.tally import Tally
from schemas.times import ValidityClock

STREAMS_PER_AGENT = 64
IN_ALL = 4096


class StreamLimitError(PeerError):
    """The limit of the agent, or that of all, is reached."""


@define(eq=False, repr=False)
class OpenStreams:
    """The streams of all agents."""

    _per_agent: int = STREAMS_PER_AGENT
    _in_all: int = IN_ALL
    _held: Tally[AgentName] = field(init=False, factory=Tally)
    _ends: dict[str, dict[object, Callable[[], None]]] = field(init=False, factory=dict)

    def check(self, principal: Principal) -> None:
        """Return if another stream may be opened. Raises StreamLimitError."""
        if self._held[principal.name] >= self._per_agent or self._held.total() >= self._in_all:
            raise StreamLimitError

    def hold(self, principal: Principal, end: Callable[[], None] = lambda: None) -> Callable[[], None]:
        """Count a stream that ``principal`` has opened; ``end`` is called if its token is revoked.

        Returns what to call, once or more, when it is closed.
        """
        key = object()
        self._held[principal.name] += 1
        self._ends.setdefault(principal.jti, {})[key] = end

        def release() -> None:
            ends = self._ends.get(principal.jti, {})
            if ends.pop(key, None) is None:
                return
            if not ends:
                del self._ends[principal.jti]
            self._held[principal.name] -= 1

        return release

    def revoke(self, jtis: Collection[str]) -> None:
        for jti in self._ends.keys() & set(jtis):
            for end in list(self._ends[jti].values()):
                end()


UpdateT = TypeVar("UpdateT", bound=Hashable)


@define(eq=False, repr=False)
class PendingUpdates(Generic[UpdateT]):
    """The updates for one client, in the order of their first change since they were last sent."""

    _pending: dict[UpdateT, None] = field(init=False, factory=dict)
    _changed: asyncio.Event = field(init=False, factory=asyncio.Event)
    _closed: bool = field(init=False, default=False)

    def add(self, update: UpdateT) -> None:
        self._pending[update] = None
        self._changed.set()

    def close(self) -> None:
        """Let ``next`` return None once nothing waits."""
        self._closed = True
        self._changed.set()

    async def next(self) -> UpdateT | None:
        """Remove the first update and return it, and wait for one; None after the last."""
        while not self._pending:
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        update = next(iter(self._pending))
        del self._pending[update]
        return update


MAX_FOLLOWED = 256
"""Of one session, or one subscription."""
FOLLOWED_PER_AGENT = 2 * MAX_FOLLOWED
"""By all streams of one agent: to follow others, it opens a new stream before it closes the old one."""


@define(eq=False, repr=False)
class FollowedResources:
    """The resources that ``principal`` follows here; ``updated`` is called with the URI of each update.

    ``held`` counts those of each agent on all of its streams.
    """

    _telemetry: NodeTelemetry
    _principal: Principal
    _updated: Callable[[str], None]
    _held: Tally[AgentName]
    _followed: dict[Place, tuple[str, Callable[[], None]]] = field(init=False, factory=dict)

    @property
    def uris(self) -> Collection[str]:
        return [uri for uri, _ in self._followed.values()]

    def add(self, uri: str) -> bool:
        """Follow ``uri``; return whether it can be followed, and there are not too many."""
        place, name = self._place_of(uri), self._principal.name
        if place is None or place in self._followed:
            return place is not None
        if len(self._followed) >= MAX_FOLLOWED or self._held[name] >= FOLLOWED_PER_AGENT:
            return False
        stop = self._telemetry.follow(self._principal, uri, lambda: self._updated(uri))
        if stop is not None:
            self._followed[place] = uri, stop
            self._held[name] += 1
        return stop is not None

    def remove(self, uri: str) -> None:
        """Follow no longer what ``uri`` names, or was named by it: a label may have been given away."""
        named = [place for place, (first, _) in self._followed.items() if first == uri]
        place = named[0] if named else self._place_of(uri)
        if place in self._followed:
            _, stop = self._followed.pop(place)
            self._held[self._principal.name] -= 1
            stop()

    def close(self) -> None:
        for stop in self.released():
            stop()

    def released(self) -> Collection[Callable[[], None]]:
        """Count what is followed here no longer; return what ends it, so that another can follow it first."""
        stops = [stop for _, stop in self._followed.values()]
        self._held[self._principal.name] -= len(stops)
        self._followed.clear()
        return stops

    def _place_of(self, uri: str) -> Place | None:
        try:
            return self._telemetry.place_of(self._principal, uri)
        except UnknownNodeError:
            return None


TOO_MANY_STREAMS = "Too many sessions and subscriptions are open; close one."

_FOLLOWING = "following"
"""The key under which a session of the old era keeps what it follows."""

RESOURCE_SUBSCRIPTIONS = ("resources/subscribe", "resources/unsubscribe")
"""The methods of the old era by which a session follows a resource."""
NOT_FOLLOWED = "This resource cannot be followed, or too many are; only node://{node_id}/telemetry changes."


@define(eq=False, repr=False)
class _Following:
    """What a session of the old era follows, by the token that its owner has used last.

    Attributes:
        selection: what it is notified of changes of; None until the client is ready.
        uris: the resources that its client follows.
        resources: those of them that the token sees, once there were any.
        by_token: what ends with the token, and begins again with the next.
        counted: what else this token holds while the session lasts.
    """

    connection: Connection
    principal: Principal
    selection: Selection | None = None
    uris: Collection[str] = ()
    resources: FollowedResources | None = None
    by_token: ExitStack = field(init=False, factory=ExitStack)
    counted: ExitStack = field(init=False, factory=ExitStack)

    def close(self) -> None:
        self.by_token.close()
        self.counted.close()


@define(eq=False, repr=False)
class ChangeStreams:
    """The change streams of all agents."""

    _notifier: ChangeNotifier
    _telemetry: NodeTelemetry
    _streams: OpenStreams
    _options: UrlOptionReader
    _now_ms: ValidityClock
    _followed_by: Tally[AgentName] = field(init=False, factory=Tally)

    def revoke(self, jtis: Collection[str]) -> None:
        self._streams.revoke(jtis)

    def open_session(self, principal: Principal) -> Callable[[], None]:
        """Count a request that can only open a session; return what ends the counting.

        The SDK allocates a session before it calls any code of ours.

        Raises:
            StreamLimitError: the agent's limit, or that of all, is reached.
        """
        self._streams.check(principal)
        return self._streams.hold(principal)

    def count_session(self, context: Context) -> None:
        """Count a session of the old era while it lasts; its notifications end with its token."""
        self._following(context)

    def follow_session(self, context: Context) -> None:
        """Notify a session of the old era of changes while it lasts and its token is accepted."""
        following = self._following(context)
        if following.selection is None:  # a client may send ``initialized`` twice
            following.selection = self._selection_of(context)
            self._listen(following)

    def subscribe(self, context: Context) -> None:
        """Let a session of the old era follow a resource while it lasts, or no longer."""
        following, uri = self._following(context), str((context.params or {}).get("uri"))
        if context.method == RESOURCE_SUBSCRIPTIONS[1]:
            if following.resources is not None:
                following.resources.remove(uri)
                following.uris = following.resources.uris
            return
        if following.resources is None:
            following.resources = self._resources(following)
        if not following.resources.add(uri):
            raise MCPError(types.INVALID_PARAMS, NOT_FOLLOWED)
        following.uris = following.resources.uris

    def renew(self, connection: Connection, principal: Principal) -> None:
        """Let a session of the old era follow by the token that its owner uses now, what that may see.

        Tokens of a sign-in last an hour, sessions longer.
        """
        following: _Following | None = connection.state.get(_FOLLOWING)
        if following is None:
            return
        with following.by_token.pop_all() as ended, following.counted.pop_all():
            following.principal = principal
            self._hold(following)
            if following.selection is not None:
                self._listen(following)
            if following.resources is not None:
                for stop in following.resources.released():
                    ended.callback(stop)
                following.resources = self._resources(following)
                for uri in following.uris:
                    following.resources.add(uri)

    def _following(self, context: Context) -> "_Following":
        """Return what the session follows; it is counted from the first time that this is asked."""
        connection = connection_of(context)
        following: _Following | None = connection.state.get(_FOLLOWING)
        if following is None:
            following = connection.state[_FOLLOWING] = _Following(connection, caller_of(context).principal)
            self._hold(following)
            connection.exit_stack.callback(following.close)
        return following

    def _hold(self, following: "_Following") -> None:
        principal, end = following.principal, following.by_token.close
        following.counted.callback(self._streams.hold(principal, end))
        ending = asyncio.get_running_loop().call_later(self._seconds_left(principal), end)
        following.counted.callback(ending.cancel)

    def _listen(self, following: "_Following") -> None:
        changed, rights = following.connection.send_tool_list_changed, following.principal.rights
        following.by_token.callback(
            self._notifier.listen(rights, changed, following.selection or WHOLE_FLEET)
        )

    def _resources(self, following: "_Following") -> FollowedResources:
        """Return what a session follows by its token; its updates are sent in a task that ends with that."""
        updates = PendingUpdates[str]()

        async def send_updates() -> None:
            while (uri := await updates.next()) is not None:
                await following.connection.send_resource_updated(uri)  # dropped where there is no stream

        sending = asyncio.create_task(send_updates())
        resources = FollowedResources(self._telemetry, following.principal, updates.add, self._followed_by)
        following.by_token.callback(sending.cancel)
        following.by_token.callback(resources.close)
        return resources

    async def listen(
        self, context: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        """Serve ``subscriptions/listen`` of the new era until the client disconnects or its token ends."""
        principal = caller_of(context).principal
        try:
            self._streams.check(principal)
        except StreamLimitError:
            raise MCPError(types.INTERNAL_ERROR, TOO_MANY_STREAMS) from None
        updates = PendingUpdates[ServerEvent]()
        with ExitStack() as stack:
            ending = asyncio.get_running_loop().call_later(self._seconds_left(principal), updates.close)
            stack.callback(ending.cancel)
            stack.callback(self._streams.hold(principal, updates.close))
            honored = self._follow(context, params.notifications, updates, stack)
            return await _serve_updates(context, honored, updates)

    def _follow(
        self,
        context: Context,
        wanted: types.SubscriptionFilter,
        updates: PendingUpdates[ServerEvent],
        stack: ExitStack,
    ) -> types.SubscriptionFilter:
        """Follow what is ``wanted`` until ``stack`` is closed; return what of it is followed."""
        principal = caller_of(context).principal

        async def tools_changed() -> None:
            updates.add(ToolsListChanged())

        if wanted.tools_list_changed:
            selection = self._selection_of(context)
            stack.callback(self._notifier.listen(principal.rights, tools_changed, selection))
        followed = FollowedResources(
            self._telemetry,
            principal,
            lambda uri: updates.add(ResourceUpdated(uri=uri)),
            self._followed_by,
        )
        stack.callback(followed.close)
        uris = [uri for uri in wanted.resource_subscriptions or () if followed.add(uri)]
        return types.SubscriptionFilter(
            tools_list_changed=wanted.tools_list_changed or None,
            prompts_list_changed=wanted.prompts_list_changed or None,
            resources_list_changed=wanted.resources_list_changed or None,
            resource_subscriptions=uris or None,
        )

    def _selection_of(self, context: Context) -> Selection:
        caller = caller_of(context)
        try:
            return self._options.read(caller.query, caller.path).selection
        except UrlOptionError:
            return WHOLE_FLEET  # what is listed by this URL is an error, which says what is wrong

    def _seconds_left(self, principal: Principal) -> float:
        return principal.expires_s - self._now_ms() / 1000


async def _serve_updates(
    context: Context, honored: types.SubscriptionFilter, updates: PendingUpdates[ServerEvent]
) -> types.SubscriptionsListenResult:
    """Acknowledge a subscription of the new era, and send its updates until they end.

    The SDK's own handler ends a stream whose client does not read for a while; here its updates coalesce.
    """
    meta = {SUBSCRIPTION_ID_META_KEY: context.request_id}
    acknowledgement = types.SubscriptionsAcknowledgedNotification(
        params=types.SubscriptionsAcknowledgedNotificationParams(notifications=honored, _meta=meta)
    )
    await context.session.send_notification(acknowledgement, related_request_id=context.request_id)
    while (event := await updates.next()) is not None:
        notification = event_to_notification(event, meta)
        await context.session.send_notification(notification, related_request_id=context.request_id)
    return types.SubscriptionsListenResult(_meta=meta)


_SESSION_ID = b"mcp-session-id"
_LEVEL_IN_STATE = "log level"


@define(eq=False, repr=False)
class LogStreams:
    """The event streams of all MCP sessions of the old era."""

    _streams: SessionEvents

    def follow_session(self, context: Context) -> None:
        connection = connection_of(context)
        stream_id = connection.session_id
        if stream_id is None or _LEVEL_IN_STATE in connection.state:
            return
        connection.state[_LEVEL_IN_STATE] = LEVEL

        async def send(event: str) -> bool:
            if connection.state[_LEVEL_IN_STATE] not in LEVELS_WITH_INFO:
                return False
            await connection.notify(*log_message(event))
            return True

        self._streams.attach(stream_id, send)
        connection.exit_stack.callback(self._streams.detach, stream_id)

    def renew(self, connection: Connection, principal: Principal) -> None:
        """Let a session's event stream follow by the token that its owner uses now."""
        if connection.session_id is not None:
            self._streams.renewed(connection.session_id, principal)

    async def set_level(self, context: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
        connection_of(context).state[_LEVEL_IN_STATE] = params.level
        return types.EmptyResult()

    @contextmanager
    def watched(self, caller: Caller, send: Send) -> Iterator[Send]:
        """Yield what sends the response to a GET request; the event stream is open if the SDK accepts it."""
        stream_id, is_open = caller.headers.get(_SESSION_ID), False

        async def passed_on(message: Message) -> None:
            nonlocal is_open
            await send(message)
            is_head = message["type"] == "http.response.start"
            if is_head and message["status"] == HTTPStatus.OK and stream_id is not None:
                # By now the SDK has started the task that takes what is to be sent on the stream.
                is_open = True
                self._streams.opened(stream_id, caller.principal)

        try:
            yield passed_on
        finally:
            if is_open and stream_id is not None:
                self._streams.closed(stream_id)
