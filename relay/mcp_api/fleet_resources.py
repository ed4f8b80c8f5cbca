"""``fleet://nodes`` and ``fleet://changes``: which nodes a tenant has, page by page, and what has changed.

Clients reject a message of more than a mebibyte, so both are bounded in entries and in bytes. Must not import
the MCP SDK, nor decide which caller may read.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

from relay.ascii_json import encoded
from relay.fleet.facts import listed_node
from relay.fleet.fleet import Fleet
from relay.fleet.node_record import NodeRecord
from schemas.error_roots import PeerError
from schemas.projection import is_node_id
from schemas.times import dated

NODES_PER_PAGE = 500
MAX_PAGE_BYTES = 512 * 1024
"""Of the document; in the message its quotation marks are escaped."""

RelayOf = Callable[[str], str | None]
"""Returns the relay that a node is connected to; None if it is connected to none that is known."""

_SINCE = re.compile(r"[0-9]{1,16}")


class ResourceQueryError(PeerError):
    """The query of a resource is none. The text says what is allowed, and nothing of what was given."""


class FleetResources:
    """The resources of one fleet as a whole. ``relay_of`` is None if it has one relay."""

    def __init__(self, fleet: Fleet, relay_of: RelayOf | None = None) -> None:
        self._fleet = fleet
        self._relay_of = relay_of

    def read(self, tenant: str, path: str, query: str) -> str | None:
        """Return the document at ``path`` for ``tenant``, as JSON; None if there is none.

        Raises:
            ResourceQueryError: ``query`` is not one of it.
        """
        match path:
            case "nodes":
                return self._nodes(tenant, _parameter(query, "cursor"))
            case "changes":
                return self._changes(tenant, _parameter(query, "since_ms"))
            case _:
                return None

    def _nodes(self, tenant: str, cursor: str | None) -> str:
        """Return the page of nodes behind the id ``cursor``."""
        if cursor is not None and not is_node_id(cursor):
            raise ResourceQueryError("cursor must be the nextCursor of a page before")
        # One more than a page has: whether it is there decides on the next cursor.
        nodes = self._fleet.nodes_of(tenant, cursor or "", NODES_PER_PAGE + 1)
        texts, size = list[str](), 0
        for node in nodes[:NODES_PER_PAGE]:
            text = encoded(dated(self._entry(node)))
            size += len(text)
            if size > MAX_PAGE_BYTES and texts:
                break
            texts.append(text)
        following = f',"nextCursor":"{nodes[len(texts) - 1].node_id}"' if len(texts) < len(nodes) else ""
        return f'{{"nodes":[{",".join(texts)}]{following}}}'

    def _entry(self, node: NodeRecord) -> Mapping[str, Any]:
        relay = {} if self._relay_of is None else {"relay": self._relay_of(node.node_id)}
        return {**relay, **listed_node(node, self._fleet.names)}

    def _changes(self, tenant: str, given: str | None) -> str:
        since_ms = "0" if given is None else given
        if _SINCE.fullmatch(since_ms) is None:
            raise ResourceQueryError("since_ms must be a time in milliseconds since 1970, 0 or more")
        changes, names = self._fleet.changes, self._fleet.names
        found = [
            {
                "at_ms": change.at_ms,
                "node_id": change.node_id,
                "label": names.label_in(tenant, change.node_id) or None,
                "what": change.what,
            }
            for change in changes.since(tenant, int(since_ms))
        ]
        return encoded(dated({"complete_since_ms": changes.complete_since_ms(tenant), "changes": found}))


def _parameter(query: str, name: str) -> str | None:
    """Return the value of the one parameter that a resource has; None if there is no query.

    Raises:
        ResourceQueryError: there is another one, or one without a value.
    """
    if not query:
        return None
    try:
        given = parse_qs(query, keep_blank_values=True, strict_parsing=True, max_num_fields=1)
    except ValueError:
        given = {}
    if given.keys() != {name}:
        raise ResourceQueryError(f"the one parameter of this resource is {name}, once")
    return given[name][0]
