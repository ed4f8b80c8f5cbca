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

from relay.limits.rate_limits import Allowance
from relay.observability.ascii_json import encoded
from schemas.canonical import blake3_hex, jcs
from schemas.delivery import DEFAULT_HANDLER_MS
from schemas.kinds import Kind, KindRegistry, Verb
from schemas.projection import (
    META_CANONICAL_NAME,
    META_CAPABILITY_ETAG,
    META_SAFETY_CLASS,
    META_SCHEMA_REF,
    ToolName,
    alias_of,
)
from schemas.registry import SCHEME, SchemaRegistry, Validator, listed_schema


def hints(safety_class: str, *, idempotent: bool, untrusted: bool = False) -> dict[str, Any]:
    """Return the annotations of a tool, but for its title."""
    return {
        "readOnlyHint": safety_class == "read_only",
        "destructiveHint": safety_class == "physical_actuation",
        "idempotentHint": idempotent,
        "openWorldHint": untrusted,
        "x-safety-class": safety_class,
    }


# A character that none of our documents contains: marks in the template where a string goes.
_GAP = "\0"


class EntryTemplate:
    """What the entries in ``tools/list`` of one kind, verb and safety class have in common.

    They differ in four short strings only: one template of about two kilobytes is shared, from which the text
    of an entry is put together without encoding.

    Raises:
        ValueError: a document contains a NUL character.
    """

    def __init__(
        self,
        verb: Verb,
        input_schema: Mapping[str, Any],
        output_schema: Mapping[str, Any],
        safety_class: str,
    ) -> None:
        self._title = verb.title
        self._shared = {
            "description": verb.description,
            "inputSchema": input_schema,
            "outputSchema": output_schema,
        }
        self._hints = hints(safety_class, idempotent=verb.idempotent, untrusted=bool(verb.untrusted))
        self._safety_class = safety_class
        self._schema_ref = SCHEME + verb.input_ref
        pieces = encoded(self._document(_GAP, _GAP, _GAP, _GAP)).split(encoded(_GAP)[1:-1])
        self._head, self._to_title, self._to_hints, self._to_etag, self._to_canonical, self._tail = pieces

    def document(self, name: str, label: str, etag: str, canonical: str) -> dict[str, Any]:
        """Return the entry of one tool of the node that the operator calls ``label``, if not empty."""
        return self._document(name, _before_title(label), etag, canonical)

    def text(self, name: str, label: str, etag: str, canonical: str) -> str:
        """Return the same entry as JSON. Letters of a label beyond ASCII are all that needs an escape."""
        before_title = encoded(_before_title(label))[1:-1]
        return (
            f"{self._head}{name}{self._to_title}{before_title}{self._to_hints}{before_title}"
            f"{self._to_etag}{etag}{self._to_canonical}{canonical}{self._tail}"
        )

    def _document(self, name: str, before_title: str, etag: str, canonical: str) -> dict[str, Any]:
        title = before_title + self._title
        return {
            "name": name,
            "title": title,
            **self._shared,
            "annotations": {"title": title, **self._hints},
            "_meta": {
                META_SAFETY_CLASS: self._safety_class,
                META_CAPABILITY_ETAG: etag,
                META_CANONICAL_NAME: canonical,
                META_SCHEMA_REF: self._schema_ref,
            },
        }


def _before_title(label: str) -> str:
    return f"{label}: " if label else ""


@dataclass(frozen=True, slots=True)
class ToolSchemas:
    """The input and the output of a tool, each compiled and as it is listed."""

    arguments: Validator
    result: Validator
    input_schema: Mapping[str, Any]
    output_schema: Mapping[str, Any]

    @classmethod
    def of(cls, registry: SchemaRegistry, input_ref: str, output_ref: str) -> "ToolSchemas":
        """Return the documents of the registry by their references.

        Raises:
            KeyError: there is no such document.
        """
        return cls(
            arguments=registry.load(input_ref),
            result=registry.load(output_ref),
            input_schema=listed_schema(registry, input_ref),
            output_schema=listed_schema(registry, output_ref),
        )


BATCH_SIZE = 64
"""How many tools of one node are listed before as many of every other node."""

Position = tuple[int, str]
"""A position in every list: turn and canonical name."""
BEFORE_ALL: Position = (-1, "")
"""Before every tool."""

KindVerb = tuple[str, str]
"""The first token of a kind's names, and a verb: what one tool of the kinds view represents."""

# The default of the manifest's schema.
_DEFAULT_CONCURRENCY = 1
_ENTRY_BYTES = 768


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbContract(ToolSchemas):
    """What all tools of one kind and verb share. Thousands of nodes share one of these."""

    kind: Kind
    verb: Verb
    schema_bytes: int

    @property
    def kind_verb(self) -> KindVerb:
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
        turn: which run of ``BATCH_SIZE`` of its node's tools, by name, it is in. Counted over all of
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
    def kind_verb(self) -> KindVerb:
        return self.surface.kind_verb

    @property
    def untrusted(self) -> tuple[str, ...]:
        return self.surface.verb.untrusted

    @property
    def asks(self) -> tuple[tuple[str, ...], ...]:
        """The paths of the members of its result that name a tool to ask next."""
        return self.surface.verb.asks

    @property
    def idempotent(self) -> bool:
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
        return self.entry.document(self._name(dashed=dashed), self.label, self.etag, self.canonical)

    def listed_text(self, *, dashed: bool = False) -> str:
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

    @property
    def kind_names(self) -> list[str]:
        return sorted(kind.name for kind in self._kinds)

    def knows(self, kind_short: str) -> bool:
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
            if turn := rank // BATCH_SIZE:
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
    schemas = ToolSchemas.of(registry, verb.input_ref, verb.output_ref)
    shown = [verb.description, schemas.input_schema, schemas.output_schema]
    return VerbContract(
        schemas.arguments,
        schemas.result,
        schemas.input_schema,
        schemas.output_schema,
        kind=kind,
        verb=verb,
        schema_bytes=len(jcs(shown)),
    )
