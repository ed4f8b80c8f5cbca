"""Callers that lend a tool to nodes, and the nodes' local agents, which request it.

Each request carries a token of its own. A caller answers some requests a second time, which must change
nothing. Must not judge.
"""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2

from tests.chaos.agents import NOT_REACHED, Agent, ToolCall, code_of, messages
from tests.chaos.callers import new_id
from tests.chaos.history import Reply, Request, Served
from tests.chaos.journals import written
from tests.chaos.site import now_ms

TOOL = "get_memory"
_WAIT_MS = 2000
_AGAIN_S = 0.2
_SECOND_ANSWERS = 0.1
_PATIENCE_S = 20.0
_MAX_LINE = 1 << 20
_NO_SESSION = "E_SAFETY_DENIED"

Ways = Sequence[httpx2.AsyncClient]
"""The connections of one caller, to each relay."""


class Lender:
    """One caller, an agent of each relay: every request of its goes by way of any of them.

    Attributes:
        sessions: those that are open, by node.
        served: its requests, by their ids.
    """

    def __init__(self, caller_id: str, agents: Sequence[Agent], journal: Path, chance: random.Random) -> None:
        self.caller_id = caller_id
        self.sessions: dict[str, str] = {}
        self.served: dict[str, Served] = {}
        self._agents = agents
        self._journal = journal
        self._chance = chance

    async def keep_lending(self, node_id: str) -> None:
        """Lend the tool to a node, in one session after another, until cancelled."""
        async with AsyncExitStack() as stack:
            ways = [await stack.enter_async_context(agent.connected()) for agent in self._agents]
            while True:
                context = {"caller_id": self.caller_id, "caller_tools": [{"name": TOOL}]}
                try:
                    code, opened = await self._call(ways, "session_message", node_id=node_id, context=context)
                    if code == "ok":
                        self.sessions[node_id] = opened["session_id"]
                        await self._serve(ways, opened["session_id"], node_id, opened["next"])
                except NOT_REACHED:
                    pass  # it is not known whether a session was opened: a new one replaces its tools
                await asyncio.sleep(_AGAIN_S)

    async def _serve(self, ways: Ways, session: str, node_id: str, after: int) -> None:
        """Serve a session until it has ended."""
        while True:
            try:
                code, polled = await self._call(
                    ways, "session_events", session_id=session, after=after, wait_ms=_WAIT_MS
                )
                if code == _NO_SESSION:
                    return
                for event in polled.get("events", ()):
                    if event["type"] == "caller_tool_request":
                        await self._answer(ways, session, node_id, event)
                after = polled.get("next", after)
                if polled.get("ended"):
                    return
                if code != "ok":  # the relay that keeps the session is not reached
                    await asyncio.sleep(_AGAIN_S)
            except NOT_REACHED:
                await asyncio.sleep(_AGAIN_S)

    async def _answer(self, ways: Ways, session: str, node_id: str, event: Mapping[str, Any]) -> None:
        """Answer a request; one that is read again after a lost connection may not have been answered."""
        request_id, token = event["request_id"], event["arguments"]["token"]
        served = self.served.setdefault(request_id, Served(request_id, token, self.caller_id, node_id))
        result = {"token": token, "caller": self.caller_id, "request_id": request_id}
        answers = [result]
        if self._chance.random() < _SECOND_ANSWERS:
            answers.append({**result, "token": "a second answer"})
        for answer in answers:
            arguments = {"session_id": session, "request_id": request_id, "result": answer}
            code, _ = await self._call(ways, "caller_tool_response", **arguments)
            served.accepted += code == "ok"
            if code != "ok":
                break  # not taken, as where the session is not reached: the next would be the first
        written(self._journal, asdict(served))

    async def _call(self, ways: Ways, tool: str, **arguments: Any) -> tuple[str, Mapping[str, Any]]:
        """Return the code of a call of a tool of a relay, empty without an answer, and its result."""
        call = ToolCall(new_id(self._chance), tool, arguments)
        answers = [message async for message in messages(self._chance.choice(ways), call)]
        code = code_of(answers[-1]) if answers else ""
        return code, answers[-1]["result"]["structuredContent"] if code == "ok" else {}


class Requester:
    """The local agent of a node that uses what one caller lends, at the node's ``socket``.

    Attributes:
        requests: what it has requested.
        newest_ok_ms: when it began the newest request that was answered with a result.
    """

    def __init__(self, part: str, node_id: str, lender: Lender, socket: Path, journal: Path) -> None:
        self.part = part
        self.node_id = node_id
        self.requests: list[Request] = []
        self.newest_ok_ms = 0
        self._lender = lender
        self._socket = socket
        self._journal = journal
        self._is_stopped = False

    @property
    def caller(self) -> str:
        """Whose tool it uses."""
        return self._lender.caller_id

    def stop(self) -> None:
        """Have it end after the request that it makes."""
        self._is_stopped = True

    async def keep_requesting(self, chance: random.Random) -> None:
        """Request the tool again and again, until told to stop."""
        while not self._is_stopped:
            if (session := self._lender.sessions.get(self.node_id)) is not None:
                with suppress(OSError):  # the node may not run now
                    await self._attached(session, chance)
            await asyncio.sleep(_AGAIN_S)

    async def _attached(self, session: str, chance: random.Random) -> None:
        """Request in one session until its caller has another, or the connection has ended."""
        reader, writer = await asyncio.open_unix_connection(str(self._socket), limit=_MAX_LINE)
        connection = _Connection(reader, writer)
        reading = asyncio.create_task(connection.read())
        try:
            attached = await connection.ask("attach", "session_attach", {"session_id": session})
            if attached is None or "result" not in attached:
                return
            while not self._is_stopped and session == self._lender.sessions[self.node_id]:
                await self._request(connection, new_id(chance))
                if connection.has_ended:
                    return
                await asyncio.sleep(_AGAIN_S)
        finally:
            reading.cancel()
            writer.close()

    async def _request(self, connection: "_Connection", token: str) -> None:
        request = Request(token, self._lender.caller_id, self.node_id, self.part, now_ms())
        self.requests.append(request)
        connection.requests[token] = request
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await connection.ask(token, "caller_tool", {"tool": TOOL, "arguments": {"token": token}})
        except TimeoutError:
            request.is_given_up = True
        request.ended_ms = now_ms()
        written(self._journal, asdict(request))
        if any(reply.code == "ok" for reply in request.replies):
            self.newest_ok_ms = request.began_ms


class _Connection:
    """A connection to a node's socket, and the requests that were made on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests: dict[str, Request] = {}
        self.has_ended = False
        self._reader = reader
        self._writer = writer
        self._waiting: dict[str, asyncio.Future[dict[str, Any] | None]] = {}

    async def ask(self, request_id: str, method: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the answer; None if the connection ended before."""
        waiting = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        request = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
        self._writer.write(json.dumps(request).encode("ascii") + b"\n")
        return None if self.has_ended else await waiting

    async def read(self) -> None:
        """Note each answer, also a second one, until the connection ends."""
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                request_id = message.get("id")
                if (request := self.requests.get(request_id)) is not None:
                    request.replies.append(_reply(message))
                if (waiting := self._waiting.get(request_id)) is not None and not waiting.done():
                    waiting.set_result(message)
        except ConnectionError:
            pass
        finally:
            self.has_ended = True
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_result(None)


def _reply(message: Mapping[str, Any]) -> Reply:
    if "error" in message:
        return Reply(str((message["error"].get("data") or {}).get("code", message["error"]["code"])))
    result = message["result"]
    return Reply("ok", result.get("token"), result.get("caller"), result.get("request_id"))
