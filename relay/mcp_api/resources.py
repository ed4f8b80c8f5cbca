"""The resources that an agent can read: the nodes, what they signed, and the schemas.

| uri | content |
|---|---|
| `fleet://nodes{?cursor}` | the tenant's nodes: id, names, whether connected, when the manifest expires |
| `fleet://changes{?since_ms}` | what came, went, changed and was renamed |
| `node://{node_id}/manifest` | the signed bytes, so that an agent can verify them |
| `node://{node_id}/identity` | the leaf that they were signed with |
| `node://{node_id}/telemetry` | the latest sample, while there is a subscription; `?since_ms=`, the history |
| `schema://{kind}@{semver}` | a document of the registry |

For the id a label will do (percent-encoded), or the beginning of the id. Another tenant's node does not exist
here either. Must not import the MCP SDK.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from relay.auth.agent_tokens import Principal
from relay.fleet.fleet import Fleet
from relay.fleet.node_record import NodeRecord
from relay.mcp_api.fleet_resources import NODES_PER_PAGE, FleetResources, RelayOf
from relay.mcp_api.paging import CursorError
from relay.streams.telemetry.fleet_reading import FleetReading
from relay.streams.telemetry.reading import TelemetryResource
from schemas.projection import is_node_id
from schemas.registry import SchemaRegistry

JSON = "application/json"
PEM = "application/x-pem-file"
_PARTS = {
    "manifest": ("node-manifest", JSON, "The manifest that a node signed"),
    "identity": ("node-identity", PEM, "The leaf certificate of a node"),
}
TEMPLATES = {
    "fleet-nodes": ("fleet://nodes{?cursor}", JSON, "The nodes of this tenant, page by page"),
    "fleet-changes": ("fleet://changes{?since_ms}", JSON, "What has changed among the nodes of this tenant"),
    **{
        name: (f"node://{{node_id}}/{part}", mime_type, description)
        for part, (name, mime_type, description) in _PARTS.items()
    },
    "node-telemetry": (
        "node://{node_id}/telemetry{?since_ms,cap}",
        JSON,
        "The latest sample of a node whose subscribe tool was called; with since_ms, those after that time",
    ),
    "schema": ("schema://{kind}@{semver}", JSON, "A document of the schema registry"),
}


@dataclass(frozen=True, slots=True)
class Resource:
    """One entry of ``resources/list``."""

    uri: str
    name: str
    mime_type: str
    description: str
    title: str | None = None


_OF_THE_FLEET = (
    Resource("fleet://nodes", "nodes", JSON, "The nodes of this tenant"),
    Resource("fleet://changes", "changes", JSON, "What has changed among the nodes of this tenant"),
)


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a resource."""

    mime_type: str
    text: str


class ResourceCatalog:
    """The resources of one relay."""

    def __init__(
        self,
        fleet: Fleet,
        registry: SchemaRegistry,
        telemetry: TelemetryResource,
        elsewhere: FleetReading | None = None,
        relay_of: RelayOf | None = None,
    ) -> None:
        self._fleet = fleet
        self._as_a_whole = FleetResources(fleet, relay_of)
        self._registry = registry
        self._telemetry = telemetry
        self._elsewhere = elsewhere

    def listed(self, principal: Principal, cursor: object = None) -> tuple[list[Resource], str | None]:
        """Return the page that begins at ``cursor`` of what ``principal`` can read, and the next cursor.

        It needs the scope of read-only tools.

        Raises:
            CursorError: ``cursor`` is not one that this method returned.
        """
        if not principal.rights.may_read:
            return [], None
        if cursor is None:
            return self._page(principal.tenant, "", list(_OF_THE_FLEET))
        if not isinstance(cursor, str) or not is_node_id(cursor):
            raise CursorError("cursor is not one that this server gave")
        return self._page(principal.tenant, cursor, [])

    def _page(self, tenant: str, after: str, page: list[Resource]) -> tuple[list[Resource], str | None]:
        nodes = self._fleet.nodes_of(tenant, after, NODES_PER_PAGE + 1)
        for node in nodes[:NODES_PER_PAGE]:
            if node.manifest is not None:
                page += _of_node(node, self._fleet.names.label_of(node.node_id))
        return page, nodes[NODES_PER_PAGE - 1].node_id if len(nodes) > NODES_PER_PAGE else None

    async def read_from_any(self, principal: Principal, uri: str) -> Content | None:
        """Return the content of ``uri`` as ``read`` does, of telemetry that of the relay that has it."""
        if self._elsewhere is not None and principal.rights.may_read:
            sample = await self._elsewhere.read(principal, uri)
            if sample is not None:
                return Content(JSON, sample)
        return self.read(principal, uri)

    def read(self, principal: Principal, uri: str) -> Content | None:
        """Return the content of ``uri`` for ``principal``; None if it does not exist for them.

        Raises:
            UnknownNodeError: it is of a node that does not exist for them.
            ResourceQueryError, TelemetryQueryError: its query is not one of it.
        """
        if not principal.rights.may_read:
            return None
        scheme, _, rest = uri.partition("://")
        match scheme:
            case "fleet":
                path, _, query = rest.partition("?")
                document = self._as_a_whole.read(principal.tenant, path, query)
                return None if document is None else Content(JSON, document)
            case "node":
                sample = self._telemetry.read(principal, uri)
                if sample is not None:
                    return Content(JSON, sample)
                return self._read_node(principal, *rest.partition("/")[::2])
            case "schema":
                known = self._registry.documents.get(rest)
                return Content(JSON, known.decode("utf-8")) if known else None
            case _:
                return None

    def _read_node(self, principal: Principal, reference: str, part: str) -> Content | None:
        node_id = self._fleet.names.resolve(principal.tenant, unquote(reference))
        node = self._fleet.node_of(principal.tenant, node_id)
        if node is None or node.manifest is None or self._fleet.is_hidden(node_id):
            return None
        match part:
            case "manifest":
                return Content(JSON, node.manifest.wire.decode("utf-8"))
            case "identity":
                return Content(PEM, node.manifest.identity.pem)
            case _:
                return None


def _of_node(node: NodeRecord, label: str) -> Iterator[Resource]:
    for part, (_, mime_type, description) in _PARTS.items():
        title = f"{label}: {part}" if label else None
        name = f"{node.node_id} {part}"
        yield Resource(f"node://{node.node_id}/{part}", name, mime_type, description, title)
