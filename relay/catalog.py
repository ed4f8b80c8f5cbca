"""From a trusted manifest to the tools that agents see.

One tool for each capability and verb (RFC-0001 section 3). Everything an agent reads of a tool comes from
our tables: of what the node wrote, only the tokens of the name pass, and their alphabet holds no text.
Must not know who is connected or who may see what.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.canonical import blake3_hex, jcs
from schemas.kinds import Kind, KindRegistry, Verb
from schemas.projection import ToolName
from schemas.registry import SCHEME, SchemaRegistry, Validator
from schemas.trust import TrustedManifest

META_SAFETY_CLASS = "edge-kubelet/safety-class"
META_CAPABILITY_ETAG = "edge-kubelet/capability-etag"
META_CANONICAL_NAME = "edge-kubelet/canonical-name"
META_SCHEMA_REF = "edge-kubelet/schema-ref"

_DEFAULT_DEADLINE_MS = 2000


@dataclass(frozen=True, slots=True)
class Tool:
    """One verb of one capability of one node.

    ``listed`` and ``listed_dashed`` are the entries of ``tools/list``, each of ``listed_bytes`` bytes;
    ``fingerprint`` changes when what an agent would see of the tool does.
    """

    canonical: str
    node_id: str
    safety_class: str
    idempotent: bool
    deadline_ms: int
    arguments: Validator
    result: Validator
    listed: Mapping[str, Any]
    listed_dashed: Mapping[str, Any]
    listed_bytes: int
    fingerprint: str


class Projector:
    """Projects manifests by one set of kinds and documents."""

    def __init__(self, registry: SchemaRegistry, kinds: KindRegistry) -> None:
        self._registry = registry
        self._kinds = kinds
        # Clients compile every tool's schema into one validator, which refuses an id that it has seen, and
        # some do not know the dialect's URI. What the schema is stands in `_meta` instead.
        self._bare = {
            ref: _without(registry.document(ref), "$id", "$schema")
            for kind in kinds
            for verb in kind.verbs.values()
            for ref in (verb.input_ref, verb.output_ref)
        }

    def knows(self, kind_short: str) -> bool:
        """Tell whether a kind's tool names start with ``kind_short``."""
        return self._kinds.by_short(kind_short) is not None

    def project(self, manifest: TrustedManifest) -> dict[str, Tool]:
        """Return the tools of ``manifest`` by canonical name. A verb that has no row is left out."""
        tools: dict[str, Tool] = {}
        for capability in manifest.capabilities:
            kind = self._kinds.get(capability["kind"])
            for verb_name in capability["verbs"]:
                verb = kind.verbs.get(verb_name) if kind else None
                if kind is not None and verb is not None:
                    tool = self._tool(manifest, capability, kind, verb)
                    tools[tool.canonical] = tool
        return tools

    def _tool(self, manifest: TrustedManifest, capability: Mapping[str, Any], kind: Kind, verb: Verb) -> Tool:
        identity = manifest.identity
        name = ToolName(kind.short, identity.node_id, capability["cap_id"], verb.name)
        safety_class = capability["safety_class"]
        etag = blake3_hex(jcs(capability))
        listed = {
            "name": name.canonical,
            "title": verb.title,
            "description": verb.description,
            "inputSchema": self._bare[verb.input_ref],
            "outputSchema": self._bare[verb.output_ref],
            "annotations": {
                "title": verb.title,
                "readOnlyHint": safety_class == "read_only",
                "destructiveHint": safety_class == "physical_actuation",
                "idempotentHint": verb.idempotent,
                "openWorldHint": False,
                "x-safety-class": safety_class,
            },
            "_meta": {
                META_SAFETY_CLASS: safety_class,
                META_CAPABILITY_ETAG: etag,
                META_CANONICAL_NAME: name.canonical,
                META_SCHEMA_REF: SCHEME + verb.input_ref,
            },
        }
        return Tool(
            canonical=name.canonical,
            node_id=identity.node_id,
            safety_class=safety_class,
            idempotent=verb.idempotent,
            deadline_ms=capability["constraints"].get("deadline_ms_default", _DEFAULT_DEADLINE_MS),
            arguments=self._registry.load(verb.input_ref),
            result=self._registry.load(verb.output_ref),
            listed=listed,
            listed_dashed={**listed, "name": name.alias},
            listed_bytes=len(jcs(listed)),
            fingerprint=f"{name.canonical} {verb.input_ref} {verb.output_ref} {safety_class}",
        )


def _without(document: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in keys}
