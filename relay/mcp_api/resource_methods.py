"""The relay's resources as MCP has them. Each look counts towards its agent's share, what is large for more.

Beside ``mcp_server`` and ``mcp_sdk`` the only module that imports the MCP SDK. Must not decide who may read.
"""

from collections.abc import Callable

import mcp_types as types
from mcp.shared.exceptions import MCPError

from relay.auth.agent_tokens import Principal
from relay.mcp_api.resources import TEMPLATES, ResourceCatalog
from relay.mcp_api.sdk import Context
from schemas.text import printable

LIST_TTL_MS = 5000
BYTES_LIKE_A_CALL = 4096
"""To read or write so many bytes costs about as much as one call."""

_ITEMS_LIKE_A_CALL = 20


class McpResources:
    """Answers for ``resources``; ``charge`` counts what a principal takes, and refuses what is too much."""

    def __init__(
        self,
        resources: ResourceCatalog,
        principal_of: Callable[[Context], Principal],
        charge: Callable[[Principal, float], None],
    ) -> None:
        self._resources = resources
        self._principal_of = principal_of
        self._charge = charge

    async def list(self, context: Context, _params: object) -> types.ListResourcesResult:
        """Answer ``resources/list``."""
        principal = self._principal_of(context)
        self._charge(principal, 1)
        listed = [*self._resources.listed(principal)]
        self._charge(principal, len(listed) / _ITEMS_LIKE_A_CALL)
        resources = [
            types.Resource(
                uri=item.uri, name=item.name, mime_type=item.mime_type, description=item.description
            )
            for item in listed
        ]
        return types.ListResourcesResult(resources=resources, ttl_ms=LIST_TTL_MS, cache_scope="private")

    async def templates(self, _context: Context, _params: object) -> types.ListResourceTemplatesResult:
        """Answer ``resources/templates/list``."""
        templates = [
            types.ResourceTemplate(uri_template=uri, name=name, mime_type=mime_type, description=description)
            for name, (uri, mime_type, description) in TEMPLATES.items()
        ]
        return types.ListResourceTemplatesResult(resource_templates=templates, cache_scope="private")

    async def read(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        """Answer ``resources/read``."""
        uri = str(params.uri)
        principal = self._principal_of(context)
        self._charge(principal, 1)
        content = self._resources.read(principal, uri)
        if content is None:
            raise MCPError(types.INVALID_PARAMS, "Resource not found", {"uri": printable(uri)})
        self._charge(principal, len(content.text) / BYTES_LIKE_A_CALL)
        text = types.TextResourceContents(uri=uri, mime_type=content.mime_type, text=content.text)
        return types.ReadResourceResult(contents=[text], cache_scope="private")
