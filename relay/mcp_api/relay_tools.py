"""The entries in ``tools/list`` of the tools that the relay answers itself, encoded once.

Must not decide what a tool does, nor who may call it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relay.ascii_json import encoded
from relay.auth.permissions import Rights
from relay.calls.relay_tools import RelayTool, RelayTools
from relay.fleet.tool_entry import hints
from relay.fleet.tools import Offer, Position
from relay.settings.config import View
from schemas.projection import META_CANONICAL_NAME, META_SAFETY_CLASS, META_SCHEMA_REF, alias_of
from schemas.registry import SCHEME


@dataclass(frozen=True, slots=True)
class RelayToolEntry:
    """The entry of one tool, under both forms of its name."""

    place: Position
    dotted: str
    dashed: str
    documents: tuple[dict[str, Any], dict[str, Any]]

    @classmethod
    def of(cls, tool: RelayTool, safety_class: str) -> "RelayToolEntry":
        """Return the entry of ``tool``, whose calls are of ``safety_class`` at most."""
        names = tool.canonical, alias_of(tool.canonical)
        dotted, dashed = (_document(tool, name, safety_class) for name in names)
        return cls((0, tool.canonical), encoded(dotted), encoded(dashed), (dotted, dashed))

    @property
    def listed_bytes(self) -> int:
        """How many bytes the entry has."""
        return len(self.dotted)

    def listed(self, *, dashed: bool = False) -> dict[str, Any]:
        """Return the entry as a document."""
        return self.documents[dashed]

    def listed_text(self, *, dashed: bool = False) -> str:
        """Return the same entry as JSON text."""
        return self.dashed if dashed else self.dotted


class RelayToolEntries:
    """The entries of the tools that one relay answers."""

    def __init__(self, tools: RelayTools) -> None:
        self._tools = tools
        self._entries: dict[tuple[str, str], RelayToolEntry] = {}

    def listed(
        self, rights: Rights, view: View, offered: Mapping[Offer, str], after: Position
    ) -> list[RelayToolEntry]:
        """Return the entries behind ``after`` of what ``rights`` may call in ``view``, by place.

        ``offered`` are the kinds and verbs of the nodes' tools that they reach, with their safety class.
        """
        return [
            self._entry(tool, tool.safety_class if tool.offer is None else offered[tool.offer])
            for tool in self._tools
            if view in tool.views
            and (tool.offer is None or tool.offer in offered)
            and tool.visible(rights)
            and (0, tool.canonical) > after
        ]

    def _entry(self, tool: RelayTool, safety_class: str) -> RelayToolEntry:
        key = tool.canonical, safety_class
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = RelayToolEntry.of(tool, safety_class)
        return entry


def _document(tool: RelayTool, name: str, safety_class: str) -> dict[str, Any]:
    return {
        "name": name,
        "title": tool.title,
        "description": tool.description,
        "inputSchema": tool.schemas.input_schema,
        "outputSchema": tool.schemas.output_schema,
        "annotations": {"title": tool.title, **hints(safety_class, idempotent=tool.idempotent)},
        "_meta": {
            META_SAFETY_CLASS: safety_class,
            META_CANONICAL_NAME: tool.canonical,
            META_SCHEMA_REF: SCHEME + tool.schema_ref,
        },
    }
