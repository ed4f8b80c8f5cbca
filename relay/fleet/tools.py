"""From a trusted manifest to the tools that agents see.

One tool for each capability and verb (RFC-0001 section 3). All that an agent reads of a tool comes from our
tables, except the node's label, which the operator gave it. Of what the node wrote only the tokens of the
name are used, and their alphabet permits no text. Must not know which nodes are connected, nor decide which
caller sees a tool.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from relay.fleet.tool_entry import EntryTemplate
from relay.limits.rate_limits import Allowance
from schemas.canonical import blake3_hex, jcs
from schemas.delivery import DEFAULT_HANDLER_MS
from schemas.kinds import Kind, KindRegistry, Verb
from schemas.listed_schemas import listed_schema
from schemas.projection import ToolName, alias_of
from schemas.registry import SchemaRegistry, Validator

TOOLS_PER_TURN = 64
"""How many tools of one node are listed before as many of every other node."""

Position = tuple[int, str]
"""A position in every list: turn and canonical name."""
BEFORE_ALL: Position = (-1, "")
"""Before every tool."""

Offer = tuple[str, str]
"""The first token of a kind's names, and a verb: what one tool of the kinds view represents."""

# The default of the manifest's schema.
_DEFAULT_CONCURRENCY = 1
_ENTRY_BYTES = 768


@dataclass(frozen=True, slots=True)
class VerbContract:
    """What all tools of one kind and verb share. Thousands of nodes share one of these."""

    kind: Kind
    verb: Verb
    arguments: Validator
    result: Validator
    input_schema: Mapping[str, Any]
    output_schema: Mapping[str, Any]
    schema_bytes: int

    @property
    def offer(self) -> Offer:
        """The kind and the verb."""
        return self.kind.short, self.verb.name


@dataclass(frozen=True, slots=True)
class Tool:
    """One verb of one capability of one node.

    Attributes:
        handler_ms: the longest that its handler runs, as the capability announces it.
        allowance: the limits that the capability announces (RFC-0001 section 2).
        etag: the capability's, without attestation and times.
        entry: what its entry in ``tools/list`` shares with those of other tools.
        label: what the operator calls the node; empty if nothing.
        turn: which run of ``TOOLS_PER_TURN`` of its node's tools, by name, it is in. Counted over all of
            them, for every caller alike, so that a tool has one place in every list.
    """

    canonical: str
    node_id: str
    cap_id: str
    safety_class: str
    handler_ms: int
    allowance: Allowance
    etag: str
    surface: VerbContract
    entry: EntryTemplate
    label: str = ""
    turn: int = 0

    @property
    def place(self) -> Position:
        """What lists are sorted by: a node with hundreds of tools must not fill the first page."""
        return self.turn, self.canonical

    @property
    def capability(self) -> tuple[str, str]:
        """Which capability of which node: its limits are shared by its verbs."""
        return self.node_id, self.cap_id

    @property
    def offer(self) -> Offer:
        """Its kind and verb."""
        return self.surface.offer

    @property
    def idempotent(self) -> bool:
        """Whether a second call with the same arguments has no further effect."""
        return self.surface.verb.idempotent

    @property
    def fingerprint(self) -> str:
        """Differs if and only if name, title, schemas or safety class do: those are what changes count."""
        verb = self.surface.verb
        return f"{self.canonical} {verb.input_ref} {verb.output_ref} {self.safety_class} {self.label}"

    @property
    def listed_bytes(self) -> int:
        """About how many bytes the tool's entry in ``tools/list`` has."""
        return self.surface.schema_bytes + _ENTRY_BYTES

    def listed(self, *, dashed: bool = False) -> dict[str, Any]:
        """Return the tool's entry in ``tools/list``, under its canonical name or its alias."""
        return self.entry.document(self._name(dashed=dashed), self.label, self.etag, self.canonical)

    def listed_text(self, *, dashed: bool = False) -> str:
        """Return the same entry as JSON text."""
        return self.entry.text(self._name(dashed=dashed), self.label, self.etag, self.canonical)

    def _name(self, *, dashed: bool) -> str:
        return alias_of(self.canonical) if dashed else self.canonical


def labelled(tools: Mapping[str, Tool], label: str) -> dict[str, Tool]:
    """Return the tools of one node with another label."""
    return {name: replace(tool, label=label) for name, tool in tools.items()}


class Projector:
    """Projects manifests by one set of kinds and documents."""

    def __init__(self, registry: SchemaRegistry, kinds: KindRegistry) -> None:
        self._kinds = kinds
        self._surfaces = {
            (kind.name, verb.name): _surface(registry, kind, verb)
            for kind in kinds
            for verb in kind.verbs.values()
        }
        self._entries: dict[tuple[str, str, str], EntryTemplate] = {}

    def knows(self, kind_short: str) -> bool:
        """Return whether ``kind_short`` is the first token of a kind's tool names."""
        return self._kinds.by_short(kind_short) is not None

    def project(
        self, node_id: str, capabilities: Iterable[Mapping[str, Any]], label: str = ""
    ) -> dict[str, Tool]:
        """Return a node's tools by canonical name. A verb that has no row is left out."""
        tools: dict[str, Tool] = {}
        for capability in capabilities:
            etag = blake3_hex(jcs(capability))
            for verb_name in capability["verbs"]:
                surface = self._surfaces.get((capability["kind"], verb_name))
                if surface is not None:
                    tool = self._tool(node_id, capability, etag, surface, label)
                    tools[tool.canonical] = tool
        for rank, name in enumerate(sorted(tools)):
            if turn := rank // TOOLS_PER_TURN:
                tools[name] = replace(tools[name], turn=turn)
        return tools

    def _tool(
        self, node_id: str, capability: Mapping[str, Any], etag: str, surface: VerbContract, label: str
    ) -> Tool:
        constraints = capability["constraints"]
        safety_class = sys.intern(capability["safety_class"])
        name = ToolName(surface.kind.short, node_id, capability["cap_id"], surface.verb.name)
        return Tool(
            canonical=name.canonical,
            node_id=node_id,
            cap_id=sys.intern(capability["cap_id"]),
            safety_class=safety_class,
            handler_ms=constraints.get("deadline_ms_default", DEFAULT_HANDLER_MS),
            allowance=_allowance(
                constraints["rate_limit_rps"], int(constraints.get("max_concurrency", _DEFAULT_CONCURRENCY))
            ),
            etag=etag,
            surface=surface,
            entry=self._entry(surface, safety_class),
            label=label,
        )

    def _entry(self, surface: VerbContract, safety_class: str) -> EntryTemplate:
        key = (surface.kind.name, surface.verb.name, safety_class)
        if key not in self._entries:
            self._entries[key] = EntryTemplate(
                surface.verb, surface.input_schema, surface.output_schema, safety_class
            )
        return self._entries[key]


@lru_cache(maxsize=1024)  # a fleet of thousands has a handful of them
def _allowance(rate_limit_rps: float, max_concurrency: int) -> Allowance:
    # However low the rate is, the first call is admitted at once.
    return Allowance(rate_limit_rps, max(1.0, rate_limit_rps), max_concurrency)


def _surface(registry: SchemaRegistry, kind: Kind, verb: Verb) -> VerbContract:
    input_schema = listed_schema(registry, verb.input_ref)
    output_schema = listed_schema(registry, verb.output_ref)
    return VerbContract(
        kind=kind,
        verb=verb,
        arguments=registry.load(verb.input_ref),
        result=registry.load(verb.output_ref),
        input_schema=input_schema,
        output_schema=output_schema,
        schema_bytes=len(jcs([verb.description, input_schema, output_schema])),
    )
