"""The tools that a server lists, each with its contract and whether it can be used.

A tool whose schema cannot be used, that is listed twice, or that is not verified is refused by itself; the
others remain. Must not decide who may call.
"""

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from attrs import define, field
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp_types import PaginatedRequestParams, Tool

from relay.client.remote_tools.connection import ServerConnection
from relay.client.remote_tools.contracts import (
    ContractTerms,
    Pins,
    Surface,
    ToolContract,
    Verified,
    as_used,
    size_of,
    surface_of,
)
from relay.client.remote_tools.manifests import ManifestVerifier, UnverifiedToolError
from relay.client.remote_tools.tool_schemas import UnusableSchemaError, ValueCheck, compiled
from schemas.error_roots import PeerError

MAX_PAGES = 500
MAX_TOOLS = 50_000
MAX_LIST_BYTES = 32 * 1024 * 1024
"""The size of all pages together, of what is kept of them; in memory it may be twenty times that."""
_LONGEST_NAME = 256


class ListingError(PeerError):
    """The list of tools exceeds a limit."""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One listed tool.

    Attributes:
        contract: what a call is checked against.
        surface: what a pin remembers.
        verified: what its node has signed, if that was asked for.
        manifest_fault: why it is not verified; None if it is, or need not be.
        schema_fault: why it cannot be called whatever the arguments.
        arguments, result: the compiled schemas, if there is no ``schema_fault``.
        changes: how many changes were known when it was listed.
    """

    contract: ToolContract
    surface: Surface
    verified: Verified | None
    manifest_fault: str | None
    schema_fault: str | None
    arguments: ValueCheck | None
    result: ValueCheck | None
    changes: int

    def is_current(self, now_ms: int) -> bool:
        """Return whether it can be used as it is: one that was not verified may be by now."""
        if self.verified is not None:
            return now_ms < self.verified.good_until_ms
        return self.manifest_fault is None


@define(eq=False, repr=False)
class Catalogue:
    """The tools of one server, listed when first needed and again after ``stale()``."""

    _connection: ServerConnection
    _terms: ContractTerms
    _pins: Pins | None
    _verifier: ManifestVerifier | None
    _monotonic: Callable[[], float]
    _listing: asyncio.Lock = field(factory=asyncio.Lock, init=False)
    _listings: int = field(default=0, init=False)
    _changes: int = field(default=0, init=False)
    _good_until_s: float = field(default=-math.inf, init=False)
    _listed_at: int = field(default=0, init=False)
    _counts: Counter[str] = field(factory=Counter, init=False)
    _listed_as: dict[str, Tool] = field(factory=dict, init=False)
    _entries: dict[str, CatalogueEntry] = field(factory=dict, init=False)
    _as_pinned: set[str] = field(factory=set, init=False)

    def stale(self) -> None:
        """List again before the next call: the tools changed, or may have."""
        self._changes += 1
        self._good_until_s = -math.inf

    @property
    def is_current(self) -> bool:
        return self._monotonic() < self._good_until_s

    @property
    def names(self) -> Collection[str]:
        return self._listed_as.keys()

    def known(self, name: str, now_ms: int) -> CatalogueEntry | None:
        """Return the tool ``name`` if its contract was made of the current list, and is verified still."""
        entry = self._entries.get(name) if self.is_current else None
        return entry if entry is not None and entry.is_current(now_ms) else None

    async def entry(self, name: str) -> CatalogueEntry | None:
        """Return the tool ``name``, listed again if it is not known, and verified again.

        Raises:
            NotConnectedError: there is no connection.
            MCPError: the server does not list its tools.
            ListingError: it lists too many.
        """
        if name not in self._listed_as or not self.is_current:
            await self._list()
        tool = self._listed_as.get(name)
        return await self._made(tool) if tool is not None else None

    async def is_unchanged(self, entry: CatalogueEntry) -> bool:
        """Return whether the tool is what it was as ``entry``; list again if something changed since."""
        if entry.changes == self._changes:
            return True
        now = await self.entry(entry.contract.name)
        return now is not None and (now.surface, now.contract) == (entry.surface, entry.contract)

    async def entries(self, wanted: Callable[[str], bool]) -> list[CatalogueEntry]:
        """List the tools again, and return those whose name is ``wanted``: only they are verified."""
        await self._list()
        made = []
        for tool in tuple(self._listed_as.values()):
            if wanted(tool.name):
                made.append(await self._made(tool))
                # To compile a schema takes time: a deadline has to end this between two of thousands.
                await asyncio.sleep(0)
        return made

    def changes(self, entry: CatalogueEntry) -> list[str]:
        if self._pins is None or entry.contract.name in self._as_pinned:
            return []
        return self._pins.changes(entry.contract.name, entry.surface)

    async def remember(self, *entries: CatalogueEntry) -> None:
        """Pin tools at their first use, which ``changes`` has shown to be as they were pinned, or new."""
        new = {entry.contract.name: entry.surface for entry in entries}
        as_pinned = self._as_pinned  # of this list: one that is made meanwhile has a set of its own
        if self._pins is not None and not as_pinned.issuperset(new):
            # In a thread: it waits for other processes that write the same file.
            await asyncio.to_thread(self._pins.remember, new)
            as_pinned |= {name for name, surface in new.items() if not self._pins.changes(name, surface)}

    async def accept(self, entry: CatalogueEntry) -> None:
        if self._pins is not None:
            await asyncio.to_thread(self._pins.accept, entry.contract.name, entry.surface)

    async def _list(self) -> None:
        """List the tools, unless another caller has begun to since this one has asked."""
        listings = self._listings
        async with self._listing:
            if listings == self._listings:
                self._listings += 1
                await self._list_now()

    async def _list_now(self) -> None:
        session = await self._connection.session()
        changes, began_s = self._changes, self._monotonic()
        listed, ttl_ms = await self._pages(session)
        tools = [tool for tool in listed if len(tool.name) <= _LONGEST_NAME]
        self._counts = Counter(tool.name for tool in tools)
        self._listed_as = {tool.name: tool for tool in tools}
        self._entries = {}
        self._as_pinned = set()
        self._listed_at = changes
        if changes == self._changes:
            self._good_until_s = began_s + self._connection.list_is_good_for_s(ttl_ms)

    async def _pages(self, session: ClientSession) -> tuple[list[Tool], int]:
        """Return the tools, and for how long the server says that they are so."""
        tools: list[Tool] = []
        size = 0
        cursor: str | None = None
        ttl_ms = sys.maxsize
        for _ in range(MAX_PAGES):
            params = PaginatedRequestParams(cursor=cursor) if cursor is not None else None
            page = await session.list_tools(params=params)
            used = [as_used(tool) for tool in page.tools]
            tools += used
            size += sum(map(size_of, used))
            ttl_ms = min(ttl_ms, page.ttl_ms)
            cursor = page.next_cursor
            if len(tools) > MAX_TOOLS:
                raise ListingError(f"the server lists more than {MAX_TOOLS} tools")
            if size > MAX_LIST_BYTES:
                raise ListingError(f"the tools that the server lists have more than {MAX_LIST_BYTES} bytes")
            # An empty one is a cursor in the new era; before, servers have it for the end.
            if cursor is None or not (cursor or self._connection.is_modern):
                return tools, ttl_ms
        raise ListingError(f"the server lists more than {MAX_PAGES} pages of tools")

    async def _made(self, tool: Tool) -> CatalogueEntry:
        listed_at = self._listed_at
        verified, manifest_fault = await self._verify(tool)
        arguments, result, schema_fault = None, None, None
        try:
            arguments = compiled(tool.input_schema)
            result = compiled(tool.output_schema) if tool.output_schema is not None else None
        except UnusableSchemaError as error:
            schema_fault = str(error)
        entry = CatalogueEntry(
            contract=self._terms.contract(tool, verified),
            surface=surface_of(tool),
            verified=verified,
            manifest_fault=manifest_fault,
            schema_fault="the server lists this name twice" if self._counts[tool.name] > 1 else schema_fault,
            arguments=arguments,
            result=result,
            changes=listed_at,
        )
        # The list may have been made again while it was verified.
        if self._listed_as.get(tool.name) is tool:
            self._entries[tool.name] = entry
        return entry

    async def check_named(self, entry: CatalogueEntry, arguments: Mapping[str, Any]) -> str | None:
        """Return why the nodes that a call of ``entry`` names are not verified; None if nothing is wrong."""
        return await self._checked(entry, ManifestVerifier.check_named, arguments)

    async def check_answered(self, entry: CatalogueEntry, content: object) -> str | None:
        """Return the same of the nodes that have answered such a call with ``content``."""
        return await self._checked(entry, ManifestVerifier.check_answered, content)

    async def _checked(
        self, entry: CatalogueEntry, check: Callable[..., Awaitable[None]], document: object
    ) -> str | None:
        verified = entry.verified
        if self._verifier is None or verified is None or verified.kind is None:
            return None
        try:
            session = await self._connection.session()
            await check(self._verifier, entry.contract.name, verified, document, session)
        except UnverifiedToolError as error:
            return str(error)
        except MCPError:
            return "the server does not show a node's manifest and identity"
        return None

    async def _verify(self, tool: Tool) -> tuple[Verified | None, str | None]:
        if self._verifier is None:
            return None, None
        try:
            return await self._verifier.verified(tool, await self._connection.session()), None
        except UnverifiedToolError as error:
            return None, str(error)
        except MCPError:
            return None, "the server does not show the node's manifest and identity"
