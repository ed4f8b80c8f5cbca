"""What a call of the local agent ends with: of the node's own tools, of lent tools, and of the messages.

Arguments are validated here, before anything leaves this process. Must not know MCP.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kubelet.local_agent import mailbox
from kubelet.local_agent.daemon_client import ResponseError
from kubelet.local_agent.lent_schema import LentSchema
from kubelet.local_agent.mailbox import Mailbox
from kubelet.local_agent.own_tools import OwnTools
from kubelet.local_agent.toolbox import Toolbox
from schemas.errors import Failure, ToolError
from schemas.images import Images


class Daemon(Protocol):
    """What is requested of the daemon."""

    async def request(self, method: str, params: Mapping[str, Any]) -> Any:
        """Return the result of a request, or raise a ToolError."""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a call ended with: a ``value`` and images, or an ``error`` and perhaps the caller's own text."""

    value: Any = None
    error: Mapping[str, Any] | None = None
    caller_text: str | None = None
    images: Images = ()


class AgentTools:
    """The calls of one local agent. ``make_own`` makes the node's own tools, given the node's id."""

    def __init__(
        self, toolbox: Toolbox, make_own: Callable[[str], OwnTools], correlation_id: Callable[[], str]
    ) -> None:
        self._toolbox = toolbox
        self._make_own = make_own
        self._correlation_id = correlation_id
        self._mailbox = Mailbox()
        self._own: OwnTools | None = None
        self._schemas = {name: LentSchema(entry["inputSchema"]) for name, entry in mailbox.ENTRIES.items()}
        toolbox.set_own(mailbox.ENTRIES)

    def node_known(self, node_id: str) -> None:
        """Serve the node's own tools from now on."""
        if self._own is None:
            self._own = self._make_own(node_id)
            self._own.start()
            self._toolbox.set_own({**mailbox.ENTRIES, **self._own.entries})

    def lend(self, caller_id: str, tools: list[Mapping[str, Any]]) -> None:
        """Replace what is lent."""
        self._toolbox.lend(caller_id, tools)

    def withdraw(self) -> None:
        """Note that nothing is lent: the daemon is not reached."""
        self._toolbox.withdraw()

    def message(self, message: str) -> None:
        """Keep a message of the caller until it is read."""
        self._mailbox.put(message)

    async def close(self) -> None:
        """End what runs."""
        if self._own is not None:
            await self._own.close()

    async def call(self, daemon: Daemon, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Return what a call ends with; a failure is an answer too."""
        correlation_id = self._correlation_id()
        try:
            if self._own is not None and (canonical := self._own.canonical(name)) is not None:
                answer = await self._own.call(canonical, arguments, correlation_id)
                if not answer["ok"]:
                    return ToolAnswer(error=answer["error"])
                value, images = self._own.apart(canonical, answer["result"])
                return ToolAnswer(value, images=images)
            return ToolAnswer(await self._requested(daemon, name, arguments))
        except ResponseError as error:
            envelope = error.sent or ToolError(Failure.INTERNAL).envelope()
            return ToolAnswer(
                error={**envelope, "correlation_id": correlation_id}, caller_text=error.caller_text
            )
        except ToolError as error:
            return ToolAnswer(error=error.envelope(correlation_id))

    async def _requested(self, daemon: Daemon, name: str, arguments: Mapping[str, Any]) -> Any:
        if (lent := self._toolbox.lent(name)) is not None:
            lent.schema.check(arguments)
            # With its caller_id: the request must not reach another caller that has followed meanwhile.
            params = {"caller_id": lent.caller_id, "tool": lent.name, "arguments": arguments}
            return await daemon.request("caller_tool", params)
        if (schema := self._schemas.get(name)) is None:
            raise ToolError(Failure.NAME_UNKNOWN)
        schema.check(arguments)
        if name == mailbox.READ:
            return {"messages": await self._mailbox.take(arguments.get("wait_ms", 0))}
        return await daemon.request("session_reply", arguments)
