"""What the adapters of the SDK do beside a transport; the rest is tested through the endpoint."""

from types import SimpleNamespace
from typing import Any

import pytest

from relay.calls.relay_tools import StreamClosedError
from relay.mcp_api.sdk import EXCHANGE_IN_SCOPE, Context, Exchange, emitter_of


class Session:
    """Notes what is sent on the response stream of a request."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any, Any]] = []

    async def send_notification(self, notification: Any, related_request_id: Any) -> None:
        self.sent.append((notification.method, notification.params, related_request_id))


async def test_a_notification_is_sent_while_the_clients_request_lasts_and_not_after() -> None:
    exchange, session = Exchange(), Session()
    request: Any = SimpleNamespace(scope={EXCHANGE_IN_SCOPE: exchange})
    sending: Any = session
    context = Context(
        session=sending,
        lifespan_context=None,
        protocol_version="2025-11-25",
        method="tools/call",
        request_id=7,
        request=request,
    )
    emit = emitter_of(context)
    await emit("notifications/progress", {"progress": 1})
    exchange.end()
    with pytest.raises(StreamClosedError):
        await emit("notifications/progress", {"progress": 2})
    assert session.sent == [("notifications/progress", {"progress": 1}, 7)]
