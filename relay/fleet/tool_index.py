"""The tools that are listed now, sorted, by tenant and safety class; and a version of each such set.

Kept up to date by ``node_index`` as nodes change, so that a page of ``tools/list`` is a slice, and "has this
caller's list changed" compares a few numbers. Must not decide which nodes are listed.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from hashlib import sha256
from heapq import merge
from itertools import islice

from relay.auth.permissions import Rights
from relay.fleet.tools import FIRST_PLACE, Place, Tool

Version = frozenset[tuple[str, int]]
"""Equal for equal sets of tools, by name, title, schemas and safety class. Not to be kept across restarts."""

_MODULUS = 1 << 256


class ToolIndex:
    """The listed tools of all tenants."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, _ToolList]] = {}

    def add(self, tenant: str, tools: Iterable[Tool]) -> None:
        """List ``tools``, none of which is listed, for ``tenant``."""
        for tool in tools:
            classes = self._tenants.setdefault(tenant, {})
            classes.setdefault(tool.safety_class, _ToolList()).add(tool)

    def remove(self, tenant: str, tools: Iterable[Tool]) -> None:
        """Delist ``tools``, all of which are listed for ``tenant``."""
        for tool in tools:
            classes = self._tenants[tenant]
            classes[tool.safety_class].remove(tool)
            if not classes[tool.safety_class].tools:
                del classes[tool.safety_class]
            if not classes:
                del self._tenants[tenant]

    def listed(self, rights: Rights, after: Place = FIRST_PLACE, limit: int | None = None) -> list[Tool]:
        """Return the tools that ``rights`` reach, by place: at most ``limit`` of those behind ``after``."""
        parts = [tools.behind(after, limit) for _, tools in self._reached(rights)]
        if len(parts) == 1:
            return parts[0]
        return list(islice(merge(*parts, key=_place), limit))

    def version(self, rights: Rights) -> Version:
        """Return the version of the set of tools that ``rights`` reach."""
        return frozenset((safety_class, tools.version) for safety_class, tools in self._reached(rights))

    def _reached(self, rights: Rights) -> "list[tuple[str, _ToolList]]":
        classes = self._tenants.get(rights.tenant, {})
        return [item for item in classes.items() if rights.allow(rights.tenant, item[0])]


class _ToolList:
    """The tools of one tenant and safety class, sorted by place.

    The version is the sum of the tools' hashes: a change costs one hash however many tools there are, and a
    set that is back to what it was has its former version.
    """

    __slots__ = ("tools", "version")

    def __init__(self) -> None:
        self.tools: list[Tool] = []
        self.version = 0

    def add(self, tool: Tool) -> None:
        self.tools.insert(bisect_left(self.tools, tool.place, key=_place), tool)
        self.version = (self.version + _hash_of(tool)) % _MODULUS

    def remove(self, tool: Tool) -> None:
        del self.tools[bisect_left(self.tools, tool.place, key=_place)]
        self.version = (self.version - _hash_of(tool)) % _MODULUS

    def behind(self, place: Place, limit: int | None) -> list[Tool]:
        start = bisect_right(self.tools, place, key=_place)
        return self.tools[start : None if limit is None else start + limit]


def _place(tool: Tool) -> Place:
    return tool.place


def _hash_of(tool: Tool) -> int:
    return int.from_bytes(sha256(tool.fingerprint.encode("ascii")).digest(), "big")
