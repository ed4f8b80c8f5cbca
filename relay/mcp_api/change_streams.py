"""The streams that notify agents of changes: sessions of the old era, subscriptions of the new.

Each counts towards its agent's limit (``open_streams``) and ends with its token. Must not detect changes:
``relay.fleet.change_notifier`` does.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack

import mcp_types as types
from mcp.server.subscriptions import SUBSCRIPTION_ID_META_KEY, ResourceUpdated, ServerEvent, ToolsListChanged
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import event_to_notification

from relay.auth.agent_tokens import AgentName, Principal
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.mcp_api.followed_resources import FollowedResources
from relay.mcp_api.open_streams import OpenStreams, StreamLimitError
from relay.mcp_api.pending_updates import PendingUpdates
from relay.mcp_api.sdk import Context, caller_of, connection_of
from relay.mcp_api.url_options import UrlOptionError, UrlOptionReader
from relay.streams.telemetry.fleet_listening import FleetListening
from relay.streams.telemetry.reading import TelemetryResource

TOO_MANY_STREAMS = "Too many sessions and subscriptions are open; close one."

# The keys under which a session of the old era keeps its subscription to changes.
_SUBSCRIPTION = "subscription"
_SUBSCRIBED = "subscribed"
_RESOURCES = "resources"

RESOURCE_SUBSCRIPTIONS = ("resources/subscribe", "resources/unsubscribe")
"""The methods of the old era by which a session follows a resource."""
NOT_FOLLOWED = "This resource cannot be followed, or too many are; only node://{node_id}/telemetry changes."


class ChangeStreams:
    """The change streams of all agents."""

    def __init__(
        self,
        notifier: ChangeNotifier,
        telemetry: TelemetryResource | FleetListening,
        streams: OpenStreams,
        options: UrlOptionReader,
        now_ms: Callable[[], int],
    ) -> None:
        self._notifier = notifier
        self._telemetry = telemetry
        self._options = options
        self._streams = streams
        self._now_ms = now_ms
        self._followed_by = Counter[AgentName]()

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

    def subscribe(self, context: Context) -> None:
        """Let a session of the old era follow a resource while it lasts, or no longer."""
        connection, uri = connection_of(context), str((context.params or {}).get("uri"))
        followed: FollowedResources | None = connection.state.get(_RESOURCES)
        if context.method == RESOURCE_SUBSCRIPTIONS[1]:
            if followed is not None:
                followed.remove(uri)
            return
        if followed is None:
            followed = connection.state[_RESOURCES] = self._followed(context)
        if not followed.add(uri):
            raise MCPError(types.INVALID_PARAMS, NOT_FOLLOWED)

    def _followed(self, context: Context) -> FollowedResources:
        """Return what a session follows; its updates are sent in a task that ends with it or its token."""
        connection = connection_of(context)
        updates = PendingUpdates[str]()
        sending = asyncio.create_task(_send_updates(context, updates))
        followed = FollowedResources(
            self._telemetry, caller_of(context).principal, updates.add, self._followed_by
        )
        for stack in (connection.state.setdefault(_SUBSCRIPTION, ExitStack()), connection.exit_stack):
            stack.callback(sending.cancel)
            stack.callback(followed.close)
        return followed

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
        try:
            return self._options.of(caller_of(context)).selection
        except UrlOptionError:
            return WHOLE_FLEET  # what is listed by this URL is an error, which says what is wrong

    def _seconds_left(self, principal: Principal) -> float:
        return principal.expires_s - self._now_ms() / 1000


async def _send_updates(context: Context, updates: PendingUpdates[str]) -> None:
    """Send the updates of a session of the old era until cancelled; the SDK drops what has no stream."""
    while (uri := await updates.next()) is not None:
        await context.session.send_resource_updated(uri)


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
