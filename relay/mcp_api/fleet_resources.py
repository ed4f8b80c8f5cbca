"""``fleet://nodes`` and ``fleet://changes``: which nodes a tenant has, page by page, and what has changed.

Clients reject a message of more than a mebibyte, so both are bounded in entries and in bytes. Must not import
the MCP SDK, nor decide which caller may read.
"""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from relay.ascii_json import encoded
from relay.fleet.fleet import Fleet
from relay.fleet.node_record import NodeRecord
from schemas.projection import is_node_id

NODES_PER_PAGE = 500
MAX_PAGE_BYTES = 512 * 1024
"""Of the document; in the message its quotation marks are escaped."""

_SINCE = re.compile(r"[0-9]{1,16}")


class FleetResources:
    """The resources of one fleet as a whole."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def read(self, tenant: str, path: str, query: str) -> str | None:
        """Return the document at ``path`` for ``tenant``, as JSON; None if there is none, or not so."""
        try:
            options = parse_qs(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=1)
        except ValueError:
            return None
        given = {name: values[-1] for name, values in options.items()}
        match path:
            case "nodes" if given.keys() <= {"cursor"}:
                return self._nodes(tenant, given.get("cursor"))
            case "changes" if given.keys() <= {"since_ms"}:
                return self._changes(tenant, given.get("since_ms", "0"))
            case _:
                return None

    def _nodes(self, tenant: str, cursor: str | None) -> str | None:
        """Return the page of nodes behind the id ``cursor``."""
        if cursor is not None and not is_node_id(cursor):
            return None
        # One more than a page has: whether it is there decides on the next cursor.
        nodes = self._fleet.nodes_of(tenant, cursor or "", NODES_PER_PAGE + 1)
        texts, size = list[str](), 0
        for node in nodes[:NODES_PER_PAGE]:
            text = encoded(self._summary(node))
            size += len(text)
            if size > MAX_PAGE_BYTES and texts:
                break
            texts.append(text)
        following = f',"nextCursor":"{nodes[len(texts) - 1].node_id}"' if len(texts) < len(nodes) else ""
        return f'{{"nodes":[{",".join(texts)}]{following}}}'

    def _summary(self, node: NodeRecord) -> Mapping[str, Any]:
        manifest, names = node.manifest, self._fleet.names
        return {
            "node_id": node.node_id,
            "label": names.label_of(node.node_id) or None,
            "tags": names.tags_of(node.node_id),
            "connected": node.connected,
            "manifest_etag": manifest.etag if manifest else None,
            "expires_at_ms": manifest.expires_at_ms if manifest else None,
            "tools": sorted(node.tools),
        }

    def _changes(self, tenant: str, since_ms: str) -> str | None:
        if _SINCE.fullmatch(since_ms) is None:
            return None
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
        return encoded({"complete_since_ms": changes.complete_since_ms(tenant), "changes": found})
