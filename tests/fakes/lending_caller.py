"""A caller that lends tools, on the official MCP client, in the era that a test names."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx2
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, LoggingMessageNotificationParams

from schemas.tls import client_context
from tests.fakes.caller_stage import TOOLS

BOUND_S: Final = 30
NEW: Final = "2026-07-28"
LEGACY: Final = "legacy"


class LendingCaller:
    """One client, its sessions, and the log messages that it has received.

    Attributes:
        cursors: the ``next`` of the last answer, by session.
        sessions: those that it has opened and not ended.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.client: Client
        self.logs: asyncio.Queue[LoggingMessageNotificationParams] = asyncio.Queue()
        self.cursors: dict[str, int] = {}
        self.sessions: set[str] = set()
        self._unread: list[Mapping[str, Any]] = []

    @classmethod
    @asynccontextmanager
    async def open(
        cls, mcp_url: str, token: str, mode: Any, log_level: Any = "info"
    ) -> AsyncIterator["LendingCaller"]:
        """Hold a caller, connected."""
        caller = cls(mode)
        headers = {"Authorization": f"Bearer {token}"}
        # A stream on which nothing is to be said yet is not broken.
        timeout = httpx2.Timeout(BOUND_S, read=300)
        async with httpx2.AsyncClient(
            headers=headers, timeout=timeout, trust_env=False, verify=client_context()
        ) as http:
            transport = streamable_http_client(mcp_url, http_client=http)
            client = Client(transport, mode=mode, logging_callback=caller._logged, log_level=log_level)
            async with client as caller.client:
                yield caller

    async def _logged(self, params: LoggingMessageNotificationParams) -> None:
        self.logs.put_nowait(params)

    async def log(self) -> LoggingMessageNotificationParams:
        """Return the next log message."""
        return await asyncio.wait_for(self.logs.get(), BOUND_S)

    async def try_call(self, name: str, **arguments: Any) -> CallToolResult:
        """Call a tool of the relay."""
        return await asyncio.wait_for(self.client.call_tool(name, arguments), BOUND_S + 60)

    async def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool of the relay that works."""
        result = await self.try_call(name, **arguments)
        assert not result.is_error, result.content
        content: dict[str, Any] = result.structured_content
        return content

    async def lend(
        self,
        node: str,
        tools: Sequence[Mapping[str, Any]] = TOOLS,
        caller_id: str = "ant",
        **arguments: Any,
    ) -> str:
        """Open a session with ``node`` that lends ``tools``."""
        context = {"caller_id": caller_id, "caller_tools": list(tools)}
        result = await self.call("session_message", node_id=node, context=context, **arguments)
        session_id = str(result["session_id"])
        self.sessions.add(session_id)
        return session_id

    async def end(self, session_id: str) -> None:
        """End a session."""
        self.sessions.discard(session_id)
        await self.call("session_message", session_id=session_id, end=True)

    async def event(self, session_id: str, type_: str = "caller_tool_request") -> Mapping[str, Any]:
        """Return the next event of ``type_`` as this era has it: a log message, or the answer of a poll."""
        async with asyncio.timeout(BOUND_S):
            while True:
                event = await (self._pushed() if self.mode == LEGACY else self._polled(session_id))
                if event["session_id"] == session_id and event["type"] == type_:
                    return event

    async def _pushed(self) -> Mapping[str, Any]:
        data: Mapping[str, Any] = (await self.log()).data
        return data

    async def _polled(self, session_id: str) -> Mapping[str, Any]:
        while not self._unread:
            after = self.cursors.get(session_id, 0)
            answer = await self.call("session_events", session_id=session_id, after=after, wait_ms=20_000)
            self.cursors[session_id] = answer["next"]
            self._unread += answer["events"]
        return self._unread.pop(0)

    async def answer(self, event: Mapping[str, Any], result: Any) -> None:
        """Answer a request."""
        await self.call(
            "caller_tool_response",
            session_id=event["session_id"],
            request_id=event["request_id"],
            result=result,
        )
