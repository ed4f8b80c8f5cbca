"""What agents keep open in order to be told of changes: sessions of the old era, subscriptions of the new.

Each takes a place in its agent's share (``open_streams``) and ends with its token. What changes is no matter
of this module, but ``relay.fleet.change_notifier``.
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import ExitStack

import mcp_types as types
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from mcp.shared.exceptions import MCPError

from relay.auth.agent_tokens import Principal
from relay.fleet.change_notifier import ChangeNotifier
from relay.mcp_api.open_streams import OpenStreams, StreamLimitError
from relay.mcp_api.sdk import Context, caller_of, connection_of

TOO_MANY_STREAMS = "Too many sessions and subscriptions are open; close one."

_TOLD = "told"  # under which a session of the old era keeps what tells it of changes
_FOLLOWED = "followed"


class ChangeStreams:
    """The streams of all agents over which changes are told."""

    def __init__(self, notifier: ChangeNotifier, streams: OpenStreams, now_ms: Callable[[], int]) -> None:
        self._notifier = notifier
        self._streams = streams
        self._now_ms = now_ms

    def revoke(self, jtis: Collection[str]) -> None:
        """End what was opened with one of these tokens."""
        self._streams.revoke(jtis)

    def open_session(self, principal: Principal) -> Callable[[], None]:
        """Take a place for a request that can only open a session; return what gives it back.

        The SDK keeps room for a session before it has read who opens it.

        Raises:
            StreamLimitError: there is no place.
        """
        self._streams.check(principal)
        return self._streams.hold(principal)

    def count_session(self, context: Context) -> None:
        """Count a session of the old era for as long as it lasts; what it is told ends with its token."""
        connection = connection_of(context)
        if _TOLD in connection.state:
            return  # a client may initialize as often as it likes: one session takes one place
        told = connection.state[_TOLD] = ExitStack()
        connection.exit_stack.callback(self._streams.hold(caller_of(context).principal, told.close))

    def follow_session(self, context: Context) -> None:
        """Tell a session of the old era about changes for as long as it lasts, and its token is good."""
        connection, principal = connection_of(context), caller_of(context).principal
        if _FOLLOWED in connection.state:
            return  # a client may say twice that it is ready
        connection.state[_FOLLOWED] = True
        told = connection.state.setdefault(_TOLD, ExitStack())
        stop = self._notifier.listen(principal.rights, context.session.send_tool_list_changed)
        told.callback(stop)
        ending = asyncio.get_running_loop().call_later(self._seconds_left(principal), told.close)
        connection.exit_stack.callback(ending.cancel)
        connection.exit_stack.callback(stop)

    async def listen(
        self, context: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        """Serve ``subscriptions/listen`` of the new era until the client goes, or its token ends."""
        principal = caller_of(context).principal
        try:
            self._streams.check(principal)
        except StreamLimitError:
            raise MCPError(types.INTERNAL_ERROR, TOO_MANY_STREAMS) from None
        bus = InMemorySubscriptionBus()
        handler = ListenHandler(bus)
        stop = self._notifier.listen(principal.rights, lambda: bus.publish(ToolsListChanged()))
        ending = asyncio.get_running_loop().call_later(self._seconds_left(principal), handler.close)
        release = self._streams.hold(principal, handler.close)
        try:
            return await handler(context, params)
        finally:
            release()
            ending.cancel()
            stop()

    def _seconds_left(self, principal: Principal) -> float:
        return principal.expires_s - self._now_ms() / 1000
