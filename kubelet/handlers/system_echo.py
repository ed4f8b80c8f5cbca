"""``system.echo``: returns a message, to prove that the whole path works (RFC-0005).

Must not change anything: agents and the relay's own canaries call it at any time.
"""

from collections.abc import Mapping
from typing import Any

from kubelet.handlers.base import BuiltInHandler, HandlerFactory


class EchoHandler(BuiltInHandler):
    """Answers with the message, this node's id and the time of arrival."""

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - one verb
        return {
            "message": arguments["message"],
            "received_at_ms": self.now_ms(),
            "node_id": self.node_id,
        }


HANDLER: HandlerFactory = EchoHandler
