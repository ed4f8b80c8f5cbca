"""The interface by which a call of a verb that streams starts telemetry; ``relay.streams`` implements it.

Must not know streams.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from relay.auth.agent_tokens import Principal
from relay.calls.call_record import CallAnswer, Following
from relay.fleet.tools import Tool


@dataclass(frozen=True, slots=True)
class StreamCall:
    """A call that is allowed, and has been answered by its first sample.

    Attributes:
        following: None if the call ends with its first sample, and is followed by its resource.
    """

    principal: Principal
    tool: Tool
    arguments: Mapping[str, Any]
    following: Following | None


class SampleStreams(Protocol):
    """The streams that calls start."""

    def admit(self, principal: Principal, tool: Tool) -> None:
        """Return if ``principal`` may start another stream of ``tool``.

        Raises:
            ToolError: RATE_LIMITED, it has too many.
        """
        ...

    async def start(self, call: StreamCall, first: CallAnswer) -> CallAnswer:
        """Start the stream, and return the answer of the call: at once, or when it is no longer followed.

        Raises:
            ToolError: the stream ended while it was followed.
        """
        ...
