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

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote

from attrs import define, field

from relay.auth.agent_tokens import Principal
from relay.auth.permissions import Rights
from relay.calls.stream_port import NodeTelemetry
from relay.fleet.facts import listed_node
from relay.fleet.fleet import Fleet
from relay.fleet.node_record import NodeRecord
from relay.mcp_api.tool_list import CursorError
from relay.observability.ascii_json import encoded
from schemas.error_roots import PeerError
from schemas.projection import is_node_id
from schemas.registry import SchemaRegistry
from schemas.times import dated

NODES_PER_PAGE = 500
MAX_PAGE_BYTES = 512 * 1024
"""Of the document; in the message its quotation marks are escaped."""

RelayOf = Callable[[str], str | None]
"""Returns the relay that a node is connected to; None if it is connected to none that is known."""

_SINCE = re.compile(r"[0-9]{1,16}")


class ResourceQueryError(PeerError):
    """The query of a resource is malformed. The text says what is allowed, and nothing of what was given."""


@define(eq=False, repr=False)
class FleetResources:
    """The resources of one fleet as a whole. ``relay_of`` is None if it has one relay."""

    _fleet: Fleet
    _relay_of: RelayOf | None = None

    def read(self, rights: Rights, path: str, query: str) -> str | None:
        """Return the document at ``path`` for a caller with ``rights``, as JSON; None if there is none.

        Raises:
            ResourceQueryError: ``query`` is not one of it.
        """
        match path:
            case "nodes":
                return self._nodes(rights, _parameter(query, "cursor"))
            case "changes":
                return self._changes(rights, _parameter(query, "since_ms"))
            case _:
                return None

    def _nodes(self, rights: Rights, cursor: str | None) -> str:
        if cursor is not None and not is_node_id(cursor):
            raise ResourceQueryError("cursor must be the nextCursor of a page before")
        # One more than a page has: whether it is there decides on the next cursor.
        nodes = self._fleet.reach.behind(rights, cursor or "", NODES_PER_PAGE + 1)
        texts, size = list[str](), 0
        for node in nodes[:NODES_PER_PAGE]:
            relay = {} if self._relay_of is None else {"relay": self._relay_of(node.node_id)}
            text = encoded(dated({**relay, **listed_node(node, self._fleet.names, rights)}))
            size += len(text)
            if size > MAX_PAGE_BYTES and texts:
                break
            texts.append(text)
        following = f',"nextCursor":"{nodes[len(texts) - 1].node_id}"' if len(texts) < len(nodes) else ""
        return f'{{"nodes":[{",".join(texts)}]{following}}}'

    def _changes(self, rights: Rights, given: str | None) -> str:
        since_ms = "0" if given is None else given
        if _SINCE.fullmatch(since_ms) is None:
            raise ResourceQueryError("since_ms must be a time in milliseconds since 1970, 0 or more")
        tenant, names = rights.tenant, self._fleet.names
        found = [
            {
                "at_ms": change.at_ms,
                "node_id": change.node_id,
                "label": names.label_in(tenant, change.node_id) or None,
                "what": change.what,
            }
            for change in self._fleet.reach.changes(rights, int(since_ms))
        ]
        complete_since_ms = self._fleet.changes.complete_since_ms(tenant)
        return encoded(dated({"complete_since_ms": complete_since_ms, "changes": found}))


def _parameter(query: str, name: str) -> str | None:
    """Return the value of the one parameter that a resource has; None if there is no query."""
    if not query:
        return None
    try:
        given = parse_qs(query, keep_blank_values=True, strict_parsing=True, max_num_fields=1)
    except ValueError:
        given = {}
    if given.keys() != {name}:
        raise ResourceQueryError(f"the one parameter of this resource is {name}, once")
    return given[name][0]


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


Resource = dict[str, str]
"""One entry of ``resources/list``."""


def _resource(uri: str, name: str, mime_type: str, description: str) -> Resource:
    return {"uri": uri, "name": name, "mimeType": mime_type, "description": description}


_OF_THE_FLEET = (
    _resource("fleet://nodes", "nodes", JSON, "The nodes of this tenant"),
    _resource("fleet://changes", "changes", JSON, "What has changed among the nodes of this tenant"),
)


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a resource."""

    mime_type: str
    text: str


@define(eq=False, repr=False)
class ResourceCatalog:
    """The resources of one relay."""

    _fleet: Fleet
    _registry: SchemaRegistry
    _telemetry: NodeTelemetry
    _relay_of: RelayOf | None = None
    _as_a_whole: FleetResources = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._as_a_whole = FleetResources(self._fleet, self._relay_of)

    def listed(self, principal: Principal, cursor: object = None) -> tuple[list[Resource], str | None]:
        """Return the page that begins at ``cursor`` of what ``principal`` can read, and the next cursor.

        It needs the scope of read-only tools.

        Raises:
            CursorError: ``cursor`` is not one that this method returned.
        """
        if not principal.rights.may_read:
            return [], None
        if cursor is None:
            return self._page(principal.rights, "", list(_OF_THE_FLEET))
        if not isinstance(cursor, str) or not is_node_id(cursor):
            raise CursorError("cursor is not one that this server gave")
        return self._page(principal.rights, cursor, [])

    def _page(self, rights: Rights, after: str, page: list[Resource]) -> tuple[list[Resource], str | None]:
        nodes = self._fleet.reach.behind(rights, after, NODES_PER_PAGE + 1)
        for node in nodes[:NODES_PER_PAGE]:
            if node.manifest is not None:
                page += _of_node(node, self._fleet.names.label_of(node.node_id))
        return page, nodes[NODES_PER_PAGE - 1].node_id if len(nodes) > NODES_PER_PAGE else None

    async def read(self, principal: Principal, uri: str) -> Content | None:
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
                document = self._as_a_whole.read(principal.rights, path, query)
                return None if document is None else Content(JSON, document)
            case "node":
                sample = await self._telemetry.read(principal, uri)
                if sample is not None:
                    return Content(JSON, sample)
                return self._read_node(principal, *rest.partition("/")[::2])
            case "schema":
                known = self._registry.documents.get(rest)
                return Content(JSON, known.decode("utf-8")) if known else None
            case _:
                return None

    def _read_node(self, principal: Principal, reference: str, part: str) -> Content | None:
        node_id = self._fleet.reach.resolve(principal.rights, unquote(reference))
        node = self._fleet.reach.node(principal.rights, node_id)
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
        uri, name = f"node://{node.node_id}/{part}", f"{node.node_id} {part}"
        entry = _resource(uri, name, mime_type, description)
        yield entry | {"title": f"{label}: {part}"} if label else entry
