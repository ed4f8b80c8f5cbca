"""The resources that an agent can read: the nodes, what they signed, and the schemas.

| uri | content |
|---|---|
| `fleet://nodes` | the tenant's nodes: id, whether connected, when the manifest expires |
| `node://{node_id}/manifest` | the signed bytes, so that an agent can verify them |
| `node://{node_id}/identity` | the leaf that they were signed with |
| `schema://{kind}@{semver}` | a document of the registry |

Another tenant's node does not exist here either. Must not import the MCP SDK.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from relay.auth.agent_tokens import Principal
from relay.fleet.fleet import Fleet
from relay.fleet.node_record import NodeRecord
from schemas.registry import SchemaRegistry

JSON = "application/json"
PEM = "application/x-pem-file"
TEMPLATES = {
    "node-manifest": ("node://{node_id}/manifest", JSON, "The manifest that a node signed"),
    "node-identity": ("node://{node_id}/identity", PEM, "The leaf certificate of a node"),
    "schema": ("schema://{kind}@{semver}", JSON, "A document of the schema registry"),
}


@dataclass(frozen=True, slots=True)
class Resource:
    """One entry of ``resources/list``."""

    uri: str
    name: str
    mime_type: str
    description: str


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a resource."""

    mime_type: str
    text: str


class ResourceCatalog:
    """The resources of one relay."""

    def __init__(self, fleet: Fleet, registry: SchemaRegistry) -> None:
        self._fleet = fleet
        self._registry = registry

    def listed(self, principal: Principal) -> Iterator[Resource]:
        """Yield what ``principal`` can read; it needs the scope of read-only tools."""
        if not principal.rights.may_read:
            return
        yield Resource("fleet://nodes", "nodes", JSON, "The nodes of this tenant")
        for node in self._fleet.nodes_of(principal.tenant):
            if node.manifest is not None:
                uri = f"node://{node.node_id}"
                yield Resource(
                    f"{uri}/manifest", f"{node.node_id} manifest", JSON, TEMPLATES["node-manifest"][2]
                )
                yield Resource(
                    f"{uri}/identity", f"{node.node_id} identity", PEM, TEMPLATES["node-identity"][2]
                )

    def read(self, principal: Principal, uri: str) -> Content | None:
        """Return the content of ``uri`` for ``principal``; None if it does not exist for them."""
        if not principal.rights.may_read:
            return None
        scheme, _, rest = uri.partition("://")
        match scheme:
            case "fleet" if rest == "nodes":
                nodes = [_summary(node) for node in self._fleet.nodes_of(principal.tenant)]
                return Content(JSON, json.dumps({"nodes": nodes}))
            case "node":
                return self._of_node(principal, *rest.partition("/")[::2])
            case "schema":
                document = self._registry.documents.get(rest)
                return Content(JSON, document.decode("utf-8")) if document else None
            case _:
                return None

    def _of_node(self, principal: Principal, node_id: str, part: str) -> Content | None:
        node = self._fleet.node_of(principal.tenant, node_id)
        if node is None or node.manifest is None:
            return None
        match part:
            case "manifest":
                return Content(JSON, node.manifest.wire.decode("utf-8"))
            case "identity":
                return Content(PEM, node.manifest.identity.pem)
            case _:
                return None


def _summary(node: NodeRecord) -> dict[str, object]:
    manifest = node.manifest
    return {
        "node_id": node.node_id,
        "connected": node.connected,
        "manifest_etag": manifest.etag if manifest else None,
        "expires_at_ms": manifest.expires_at_ms if manifest else None,
        "tools": sorted(node.tools),
    }
