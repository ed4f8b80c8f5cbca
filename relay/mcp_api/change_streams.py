"""The streams that notify agents of changes: sessions of the old era, subscriptions of the new.

Each counts towards its agent's limit (``open_streams``) and ends with its token. Must not detect changes:
``relay.fleet.change_notifier`` does.
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import ExitStack

import mcp_types as types
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from mcp.shared.exceptions import MCPError

from relay.auth.agent_tokens import Principal
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.mcp_api.open_streams import OpenStreams, StreamLimitError
from relay.mcp_api.sdk import Context, caller_of, connection_of
from relay.mcp_api.url_options import UrlOptionError, UrlOptionReader

TOO_MANY_STREAMS = "Too many sessions and subscriptions are open; close one."

# The keys under which a session of the old era keeps its subscription to changes.
_SUBSCRIPTION = "subscription"
_SUBSCRIBED = "subscribed"


class ChangeStreams:
    """The change streams of all agents."""

    def __init__(
        self,
        notifier: ChangeNotifier,
        streams: OpenStreams,
        options: UrlOptionReader,
        now_ms: Callable[[], int],
    ) -> None:
        self._notifier = notifier
        self._options = options
        self._streams = streams
        self._now_ms = now_ms

    def revoke(self, jtis: Collection[str]) -> None:
        """End the streams that were opened with one of these tokens."""
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
        connection = connection_of(context)
        if _SUBSCRIPTION in connection.state:
            return  # a client may initialize repeatedly: one session is counted once
        subscription = connection.state[_SUBSCRIPTION] = ExitStack()
        connection.exit_stack.callback(self._streams.hold(caller_of(context).principal, subscription.close))

    def follow_session(self, context: Context) -> None:
        """Notify a session of the old era of changes while it lasts and its token is accepted."""
        connection, principal = connection_of(context), caller_of(context).principal
        if _SUBSCRIBED in connection.state:
            return  # a client may send ``initialized`` twice
        connection.state[_SUBSCRIBED] = True
        subscription = connection.state.setdefault(_SUBSCRIPTION, ExitStack())
        stop = self._notifier.listen(
            principal.rights, context.session.send_tool_list_changed, self._selection_of(context)
        )
        subscription.callback(stop)
        ending = asyncio.get_running_loop().call_later(self._seconds_left(principal), subscription.close)
        connection.exit_stack.callback(ending.cancel)
        connection.exit_stack.callback(stop)

    async def listen(
        self, context: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        """Serve ``subscriptions/listen`` of the new era until the client disconnects or its token ends."""
        principal = caller_of(context).principal
        try:
            self._streams.check(principal)
        except StreamLimitError:
            raise MCPError(types.INTERNAL_ERROR, TOO_MANY_STREAMS) from None
        bus = InMemorySubscriptionBus()
        handler = ListenHandler(bus)
        stop = self._notifier.listen(
            principal.rights, lambda: bus.publish(ToolsListChanged()), self._selection_of(context)
        )
        ending = asyncio.get_running_loop().call_later(self._seconds_left(principal), handler.close)
        release = self._streams.hold(principal, handler.close)
        try:
            return await handler(context, params)
        finally:
            release()
            ending.cancel()
            stop()

    def _selection_of(self, context: Context) -> Selection:
        try:
            return self._options.read(caller_of(context).query).selection
        except UrlOptionError:
            return WHOLE_FLEET  # what is listed by this URL is an error, which says what is wrong

    def _seconds_left(self, principal: Principal) -> float:
        return principal.expires_s - self._now_ms() / 1000
