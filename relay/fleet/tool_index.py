"""The tools that are listed now, sorted, by tenant and safety class; and a version of each such set.

Kept up to date by ``node_index`` as nodes change, so that a page of ``tools/list`` is a slice, and "has this
caller's list changed" compares a few numbers. Must not decide which nodes are listed.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from heapq import merge
from itertools import islice

from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS, Rights
from relay.fleet.tools import BEFORE_ALL, Offer, Position, Tool

Version = frozenset[tuple[str, int]]
"""Equal for equal sets of tools, by name, title, schemas and safety class. Not to be kept across restarts."""

SEVERITY: Mapping[str, int] = {name: rank for rank, name in enumerate(SCOPE_OF_SAFETY_CLASS)}
"""The safety classes, the least severe first."""

_MODULUS = 1 << 256
_LAST = "~"
"""Behind every character of a name."""


@dataclass(frozen=True, slots=True)
class Only:
    """Some of the tools: of some kinds, or of all if there are none, and of some nodes, or of all if None.

    Tools of other kinds are skipped without being read, those of other nodes one by one.
    """

    kinds: Collection[str] = ()
    node_ids: Collection[str] | None = None

    def has_node(self, tool: Tool) -> bool:
        return self.node_ids is None or tool.node_id in self.node_ids


class ToolIndex:
    """The listed tools of all tenants."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, _ToolList]] = {}

    def add(self, tenant: str, tools: Iterable[Tool]) -> None:
        for tool in tools:
            classes = self._tenants.setdefault(tenant, {})
            classes.setdefault(tool.safety_class, _ToolList()).add(tool)

    def remove(self, tenant: str, tools: Iterable[Tool]) -> None:
        for tool in tools:
            classes = self._tenants[tenant]
            classes[tool.safety_class].remove(tool)
            if not classes[tool.safety_class].tools:
                del classes[tool.safety_class]
            if not classes:
                del self._tenants[tenant]

    def listed(self, rights: Rights, after: Position = BEFORE_ALL, limit: int | None = None) -> list[Tool]:
        """Return the tools that ``rights`` reach, by place: at most ``limit`` of those behind ``after``."""
        return _first([tools.behind(after, limit) for _, tools in self._reached(rights)], limit)

    def narrowed(
        self, rights: Rights, only: Only, after: Position = BEFORE_ALL, limit: int | None = None
    ) -> list[Tool]:
        """Return what ``listed`` would if nothing were listed but ``only``."""
        parts = [
            list(islice(filter(only.has_node, tools.of_kinds(only.kinds, after)), limit))
            for _, tools in self._reached(rights)
        ]
        return _first(parts, limit)

    def offered(self, rights: Rights) -> dict[Offer, str]:
        """Return the kinds and verbs of the tools that ``rights`` reach: the most severe class of each."""
        offered: dict[Offer, str] = {}
        for safety_class, tools in sorted(self._reached(rights), key=lambda item: SEVERITY[item[0]]):
            offered.update(dict.fromkeys(tools.offers, safety_class))
        return offered

    def version(self, rights: Rights) -> Version:
        return frozenset((safety_class, tools.version) for safety_class, tools in self._reached(rights))

    def _reached(self, rights: Rights) -> "list[tuple[str, _ToolList]]":
        classes = self._tenants.get(rights.tenant, {})
        return [item for item in classes.items() if rights.allow(rights.tenant, item[0])]


class _ToolList:
    """The tools of one tenant and safety class, sorted by place.

    The version is the sum of the tools' hashes: a change costs one hash however many tools there are, and a
    set that is back to what it was has its former version.
    """

    __slots__ = ("offers", "tools", "version")

    def __init__(self) -> None:
        self.tools: list[Tool] = []
        self.version = 0
        self.offers: Counter[Offer] = Counter()
        """How many tools there are of each kind and verb; none that has no tool."""

    def add(self, tool: Tool) -> None:
        self.tools.insert(bisect_left(self.tools, tool.place, key=_place), tool)
        self.version = (self.version + _hash_of(tool)) % _MODULUS
        self.offers[tool.offer] += 1

    def remove(self, tool: Tool) -> None:
        del self.tools[bisect_left(self.tools, tool.place, key=_place)]
        self.version = (self.version - _hash_of(tool)) % _MODULUS
        self.offers[tool.offer] -= 1
        if not self.offers[tool.offer]:
            del self.offers[tool.offer]

    def behind(self, place: Position, limit: int | None) -> list[Tool]:
        start = bisect_right(self.tools, place, key=_place)
        return self.tools[start : None if limit is None else start + limit]

    def of_kinds(self, kinds: Collection[str], place: Position) -> Iterator[Tool]:
        """Yield the tools of ``kinds`` behind ``place``, by place; those of all kinds if there are none."""
        if not kinds:
            yield from self._between(place, None)
            return
        # Within a turn, the tools of one kind are consecutive: their names begin with the kind.
        for turn in range(max(place[0], 0), self.tools[-1].turn + 1):
            for start in sorted(f"{kind}." for kind in kinds):
                yield from self._between(max(place, (turn, start)), (turn, start + _LAST))

    def _between(self, after: Position, end: Position | None) -> Iterator[Tool]:
        first = bisect_right(self.tools, after, key=_place)
        last = len(self.tools) if end is None else bisect_left(self.tools, end, key=_place, lo=first)
        # By index: a slice would copy what is not read.
        return (self.tools[number] for number in range(first, last))


def _first(parts: Sequence[list[Tool]], limit: int | None) -> list[Tool]:
    """Return the first ``limit`` of several lists, by place; each is sorted."""
    if len(parts) == 1:
        return parts[0]
    return list(islice(merge(*parts, key=_place), limit))


def _place(tool: Tool) -> Position:
    return tool.place


def _hash_of(tool: Tool) -> int:
    return int.from_bytes(sha256(tool.fingerprint.encode()).digest(), "big")
