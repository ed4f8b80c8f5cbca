"""``system.echo``: returns a message, to prove that the whole path works (RFC-0005).

Must not change anything: agents and the relay's own canaries call it at any time.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kubelet.handlers.base import Handler

# RFC-0005 section 9, word for word.
CAPABILITY: Mapping[str, Any] = {
    "cap_id": "echo",
    "kind": "system.echo",
    "schema_ref": "mcp://schemas/system.echo.invoke.input@1.0.0",
    "verbs": ["invoke"],
    "safety_class": "read_only",
    "constraints": {"rate_limit_rps": 10, "max_concurrency": 4, "deadline_ms_default": 2000},
}


class EchoHandler(Handler):
    """Answers with the message, this node's id and the time of arrival."""

    def __init__(self, node_id: str, now_ms: Callable[[], int]) -> None:
        self._node_id = node_id
        self._now_ms = now_ms

    @property
    def capability(self) -> Mapping[str, Any]:
        """The capability as the manifest contains it."""
        return CAPABILITY

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - one verb
        """Return ``{message, received_at_ms, node_id}``."""
        return {
            "message": arguments["message"],
            "received_at_ms": self._now_ms(),
            "node_id": self._node_id,
        }
