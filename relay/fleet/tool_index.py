"""The tools that are listed now, sorted, by tenant, safety class and kind; and a version of each such set.

Kept up to date by ``node_index`` as nodes change, so that a page of ``tools/list`` is a slice, and "has this
caller's list changed" compares a few numbers. Must not decide which nodes are listed.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from hashlib import sha256
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING

from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS, Rights
from relay.fleet.tools import BEFORE_ALL, KindVerb, Position, Tool
from schemas.tally import Tally

if TYPE_CHECKING:
    from schemas.kinds import Kind

Version = frozenset[tuple[str, int]]
"""Equal for equal sets of tools, by name, title, schemas and safety class. Not to be kept across restarts."""

SEVERITY: Mapping[str, int] = {name: rank for rank, name in enumerate(SCOPE_OF_SAFETY_CLASS)}
"""The safety classes, the least severe first."""

_Group = tuple[str, bool]
"""Safety class, and whether the kinds are sensitive: most callers reach all tools of a group, or none."""
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
        self._tenants: dict[str, dict[_Group, _ToolList]] = {}

    def add(self, tenant: str, tools: Iterable[Tool]) -> None:
        for tool in tools:
            groups = self._tenants.setdefault(tenant, {})
            groups.setdefault(_group(tool), _ToolList()).add(tool)

    def remove(self, tenant: str, tools: Iterable[Tool]) -> None:
        for tool in tools:
            groups, group = self._tenants[tenant], _group(tool)
            groups[group].remove(tool)
            if not groups[group].tools:
                del groups[group]
            if not groups:
                del self._tenants[tenant]

    def listed(self, rights: Rights, after: Position = BEFORE_ALL, limit: int | None = None) -> list[Tool]:
        """Return the tools that ``rights`` reach, by place: at most ``limit`` of those behind ``after``."""
        return _first([tools.behind(after, limit, kinds) for _, tools, kinds in self._reached(rights)], limit)

    def narrowed(
        self, rights: Rights, only: Only, after: Position = BEFORE_ALL, limit: int | None = None
    ) -> list[Tool]:
        """Return what ``listed`` would if nothing were listed but ``only``."""
        parts = [
            list(islice(filter(only.has_node, tools.of_kinds(admitted, after)), limit))
            for _, tools, kinds in self._reached(rights)
            if (admitted := kinds & {*only.kinds} if only.kinds else kinds)
        ]
        return _first(parts, limit)

    def offered(self, rights: Rights) -> dict[KindVerb, str]:
        """Return the kinds and verbs of the tools that ``rights`` reach: the most severe class of each."""
        offered: dict[KindVerb, str] = {}
        reached = sorted(self._reached(rights), key=lambda item: SEVERITY[item[0]])
        for safety_class, tools, kinds in reached:
            offered.update((each, safety_class) for each in tools.kind_verbs if each[0] in kinds)
        return offered

    def version(self, rights: Rights) -> Version:
        return frozenset(
            (f"{safety_class} {kind}", tools.versions[kind])
            for safety_class, tools, kinds in self._reached(rights)
            for kind in kinds
        )

    def _reached(self, rights: Rights) -> "list[tuple[str, _ToolList, AbstractSet[str]]]":
        """Return each list of which ``rights`` reach a part: its safety class, and the kinds of that part."""
        return [
            (safety_class, tools, kinds)
            for (safety_class, _), tools in self._tenants.get(rights.tenant, {}).items()
            if rights.reach(rights.tenant, safety_class) and (kinds := tools.admitted(rights))
        ]


class _ToolList:
    """The tools of one tenant and safety class, sensitive or not, sorted by place.

    The version of a kind is the sum of its tools' hashes: a change costs one hash however many tools there
    are, and a set that is back to what it was has its former version.
    """

    __slots__ = ("kind_verbs", "kinds", "tools", "versions")

    def __init__(self) -> None:
        self.tools: list[Tool] = []
        self.kinds: dict[str, Kind] = {}
        self.versions: Tally[str] = Tally()
        self.kind_verbs: Tally[KindVerb] = Tally()
        """How many tools there are of each kind and verb."""

    def add(self, tool: Tool) -> None:
        self.tools.insert(bisect_left(self.tools, tool.place, key=_place), tool)
        kind = tool.surface.kind
        self.kinds[kind.short] = kind
        self.versions[kind.short] = (self.versions[kind.short] + _hash_of(tool)) % _MODULUS
        self.kind_verbs[tool.kind_verb] += 1

    def remove(self, tool: Tool) -> None:
        del self.tools[bisect_left(self.tools, tool.place, key=_place)]
        kind = tool.surface.kind.short
        self.versions[kind] = (self.versions[kind] - _hash_of(tool)) % _MODULUS
        self.kind_verbs[tool.kind_verb] -= 1

    def admitted(self, rights: Rights) -> AbstractSet[str]:
        """Return the kinds of which there are tools that ``rights`` admit, by short name."""
        return {kind for kind in self.versions if rights.admit(self.kinds[kind])}

    def behind(self, place: Position, limit: int | None, kinds: AbstractSet[str]) -> list[Tool]:
        """Return at most ``limit`` tools of ``kinds`` behind ``place``."""
        if len(kinds) < len(self.versions):
            return list(islice(self.of_kinds(kinds, place), limit))
        start = bisect_right(self.tools, place, key=_place)
        return self.tools[start : None if limit is None else start + limit]

    def of_kinds(self, kinds: Collection[str], place: Position) -> Iterator[Tool]:
        """Yield the tools of ``kinds`` behind ``place``, by place."""
        if len(kinds) == len(self.versions):
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


def _group(tool: Tool) -> _Group:
    return tool.safety_class, tool.surface.kind.sensitive


def _place(tool: Tool) -> Position:
    return tool.place


def _hash_of(tool: Tool) -> int:
    return int.from_bytes(sha256(tool.fingerprint.encode()).digest(), "big")
