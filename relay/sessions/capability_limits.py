"""Applies the limits that capabilities announce, in the relay that holds the node's session.

So a capability has one limiter, whichever relay a call arrived at, and its rate is divided fairly among the
agents that call it. Must not know who these are.
"""

from collections.abc import Callable

from relay.fleet.fleet import Fleet
from relay.limits.rate_limits import KeyedLimiters
from relay.routing.port import Command, CommandAnswer, LocalRouter
from schemas.errors import Failure, ToolError

_UNNAMED = ""
"""The agents of a relay that does not name them, as one."""


class CapabilityLimits(LocalRouter):
    """A ``LocalRouter`` in front of ``sessions``. ``monotonic`` is in seconds."""

    def __init__(self, fleet: Fleet, sessions: LocalRouter, monotonic: Callable[[], float]) -> None:
        self._fleet = fleet
        self._sessions = sessions
        self._limiters: KeyedLimiters[tuple[str, str]] = KeyedLimiters(monotonic)

    def start(self, command: Command) -> CommandAnswer:
        """Send ``command``, as ``LocalRouter`` describes.

        Raises:
            ToolError: also RATE_LIMITED, with ``retry_after_ms``; then it was never sent.
        """
        tool = self._fleet.tool_of(command.tool)
        if tool is None:
            # It was announced when the call was decided, and is not any more.
            raise ToolError(Failure.NODE_OFFLINE)
        holder = (command.caller or _UNNAMED) if command.cost else None
        limiter = self._limiters.acquire(tool.capability, tool.allowance, command.cost, holder)
        try:
            answer = self._sessions.start(command)
        except BaseException:
            limiter.release()
            raise
        answer.at_end(lambda _: limiter.release())
        return answer
