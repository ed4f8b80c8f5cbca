"""Reads a running relay's nodes and tools as an agent does: by MCP, with a token, page by page.

Must not print, and must not choose the token.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from relay.client.stdio_bridge.http_client import RelayHttp
from schemas.error_roots import PeerError
from schemas.text import printable

_VERSION = "2026-07-28"
_META = {
    "io.modelcontextprotocol/protocolVersion": _VERSION,
    "io.modelcontextprotocol/clientCapabilities": {},
}
_OK = 200


class FleetReadError(PeerError):
    """The relay did not answer with what was read; the text says why, printably."""


class FleetReader:
    """Reads from one relay."""

    def __init__(self, http: RelayHttp) -> None:
        self._http = http

    async def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes of the token's tenant, as ``fleet://nodes`` has them.

        Raises:
            FleetReadError, NotSentError, LostError: they cannot be read.
        """
        return [node async for page in self._node_pages() for node in page]

    async def tools(self) -> list[dict[str, Any]]:
        """Return the entries of ``tools/list`` that the token reaches.

        In a fleet of several relays each has the ``relay`` that its node is connected to, as the nodes have.

        Raises:
            FleetReadError, NotSentError, LostError: they cannot be read.
        """
        tools = [tool async for tool in self._tools()]
        relays = await self._relays() if tools else {}
        return [
            tool | {"relay": relays[tool["name"]]} if tool.get("name") in relays else tool for tool in tools
        ]

    async def _relays(self) -> Mapping[str, str | None]:
        """Return the relay of each tool's node by the tool's name; empty if there is one relay."""
        found: dict[str, str | None] = {}
        try:
            async with aclosing(self._node_pages()) as pages:
                async for page in pages:
                    if not any("relay" in node for node in page):
                        break  # there is one relay, and the other pages say no more
                    found |= {name: node["relay"] for node in page for name in node["tools"]}
        except (KeyError, TypeError):
            raise FleetReadError("the relay's list of nodes is malformed") from None
        except FleetReadError:
            return {}  # a token may reach tools, and not read nodes
        return found

    async def _node_pages(self) -> AsyncGenerator[list[dict[str, Any]]]:
        uri = "fleet://nodes"
        while True:
            result = await self._result("resources/read", {"uri": uri}, uri)
            try:
                page = json.loads(result["contents"][0]["text"])
                nodes, following = list(page["nodes"]), page.get("nextCursor")
            except (KeyError, IndexError, TypeError, ValueError, AttributeError):
                raise FleetReadError("the relay's list of nodes is malformed") from None
            yield nodes
            if following is None:
                return
            uri = f"fleet://nodes?cursor={following}"

    async def _tools(self) -> AsyncIterator[dict[str, Any]]:
        params: dict[str, Any] = {}
        while True:
            result = await self._result("tools/list", params)
            try:
                for tool in result["tools"]:
                    yield tool
            except (KeyError, TypeError):
                raise FleetReadError("the relay's list of tools is malformed") from None
            if "nextCursor" not in result:
                return
            params = {"cursor": result["nextCursor"]}

    async def _result(
        self, method: str, params: Mapping[str, Any], name: str | None = None
    ) -> dict[str, Any]:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": _META}}
        headers = {"mcp-protocol-version": _VERSION, "mcp-method": method}
        if name is not None:
            headers["mcp-name"] = name
        async with self._http.exchange("POST", headers, json.dumps(message).encode("ascii")) as response:
            if response.status != _OK:
                raise FleetReadError(f"the relay refuses: {(await response.read_refusal())[1]}")
            async with aclosing(response.messages()) as messages:
                async for _, value in messages:
                    if isinstance(value.get("result"), dict):
                        return dict(value["result"])
                    if isinstance(error := value.get("error"), dict):
                        raise FleetReadError(f"the relay refuses: {printable(str(error.get('message')))}")
        raise FleetReadError("the relay answered without a result")
