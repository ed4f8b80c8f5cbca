"""The MCP methods that this relay answers with one result each: one table, for every transport and era.

A method is ``async (Caller, message, emit) -> result``. ``message`` is the JSON-RPC message. ``emit`` sends a
notification before the result; it is None where the answer cannot be a stream. A member of the result may be
``ToolEntries``. Must not import the MCP SDK, nor decide anything: the gateway decides who may call what, and
the fleet what is listed.
"""

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from attrs import define, field

from relay.ascii_json import encoded
from relay.auth.agent_tokens import Authenticator, Caller, Principal
from relay.auth.permissions import Rights
from relay.calls.call_record import CallRequest, Hop
from relay.calls.envelope import Call
from relay.calls.gateway import CallGateway
from relay.calls.relay_tools import Emit
from relay.fleet.node_names import UnknownNodeError
from relay.mcp_api.resources import TEMPLATES, Resource, ResourceCatalog, ResourceQueryError
from relay.mcp_api.tool_list import CursorError, ToolEntries, ToolList, page_of
from relay.mcp_api.url_options import UrlOptionError, UrlOptions
from relay.settings.config import View
from relay.streams.telemetry.reading import TelemetryQueryError
from schemas.error_roots import EdgeError
from schemas.errors import Failure, ToolError
from schemas.projection import META_CORRELATION_ID, META_ERROR, META_HOP
from schemas.text import printable
from schemas.times import dated
from schemas.tokens import TokenError

Method = Callable[[Caller, Mapping[str, Any], Emit | None], Coroutine[Any, Any, dict[str, Any]]]

CALL_TOOL = "tools/call"
LIST_TTL_MS = 5000
BYTES_LIKE_A_CALL = 4096
"""Reading or writing this many bytes costs about as much as one call."""

_TOOLS_LIKE_A_CALL = 20  # listing this many costs about as much as one call
_OF_A_MOMENT = '_ms":'
_INVALID_PARAMS = -32602
_INTERNAL_ERROR = -32603


class MethodError(EdgeError):
    """The method fails with a JSON-RPC error."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


@define(eq=False, repr=False)
class Methods:
    """The methods of one relay: ``tools/call`` is ``call``, and ``table`` has a ``Method`` for each other."""

    gateway: CallGateway
    _tools: ToolList
    _authenticator: Authenticator
    _resources: ResourceCatalog
    _discover: Callable[[Rights, View], dict[str, Any]]
    table: dict[str, Method] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.table = {
            "tools/list": self._list_tools,
            "resources/list": self._list_resources,
            "resources/templates/list": self._list_templates,
            "resources/read": self._read_resource,
            "prompts/list": self._list_prompts,
            "server/discover": self._discover_server,
        }

    def charge(self, principal: Principal, cost: float) -> None:
        """Charge ``cost`` calls to the agent's limit, if its token is still accepted.

        Raises:
            MethodError: the token is not accepted any more, or the limit is exceeded.
        """
        try:
            self._authenticator.check(principal)
            self.gateway.charge(principal, cost)
        except TokenError:
            refused = ToolError(Failure.TOKEN_REFUSED)
            raise MethodError(_INVALID_PARAMS, str(refused), refused.envelope()) from None
        except ToolError as error:
            raise MethodError(_INTERNAL_ERROR, str(error), error.envelope()) from None

    def charge_size(self, caller: Caller) -> None:
        """Charge a body that is larger than a call needs. Raises ToolError: RATE_LIMITED."""
        self.gateway.charge(caller.principal, caller.size / BYTES_LIKE_A_CALL)

    async def call(self, caller: Caller, call: Call, emit: Emit | None) -> dict[str, Any]:
        """Answer ``tools/call`` as a ``Method`` does, given the call that the message was parsed to."""
        selection = self.options_of(caller).selection
        answer = await self.gateway.call(CallRequest(caller, call, emit, selection))
        if answer.error is not None:
            # Not in structuredContent: clients validate that against the output schema, even in an error.
            meta = {META_ERROR: answer.error, META_HOP: (answer.hop or Hop.RELAY).value}
            return {"content": [{"type": "text", "text": answer.text}], "isError": True, "_meta": meta}
        # The structured content has to fit the schema that the node signed; the text is for a model alone.
        text = encoded(dated(answer.result)) if _OF_A_MOMENT in answer.text else answer.text
        return {
            "content": [{"type": "text", "text": text}, *answer.images],
            "structuredContent": answer.result,
            "isError": False,
            "_meta": {META_CORRELATION_ID: answer.correlation_id},
        }

    async def _list_tools(
        self, caller: Caller, message: Mapping[str, Any], _emit: Emit | None
    ) -> dict[str, Any]:
        options = self.options_of(caller)
        self.charge(caller.principal, 1)
        listed = partial(self._tools.listed, caller.principal.rights, options.selection)
        try:
            page, following = page_of(listed, message.get("params", {}).get("cursor"))
        except (CursorError, UnknownNodeError) as error:
            raise MethodError(_INVALID_PARAMS, str(error)) from None
        self.charge(caller.principal, len(page) / _TOOLS_LIKE_A_CALL)
        result: dict[str, Any] = {"tools": ToolEntries(page, options.dashed)}
        if following is not None:
            result["nextCursor"] = following
        return result | _cached(LIST_TTL_MS)

    def options_of(self, caller: Caller) -> UrlOptions:
        """Return what the caller's URL chooses.

        Raises:
            MethodError: its query is none; a client must learn that at its first request.
        """
        try:
            return self._tools.options.read(caller.query, caller.path)
        except UrlOptionError as error:
            raise MethodError(_INVALID_PARAMS, str(error)) from None

    async def _list_resources(
        self, caller: Caller, message: Mapping[str, Any], _emit: Emit | None
    ) -> dict[str, Any]:
        self.charge(caller.principal, 1)
        try:
            page, following = self._resources.listed(
                caller.principal, message.get("params", {}).get("cursor")
            )
        except CursorError as error:
            raise MethodError(_INVALID_PARAMS, str(error)) from None
        self.charge(caller.principal, len(page) / _TOOLS_LIKE_A_CALL)
        result: dict[str, Any] = {"resources": [_resource(each) for each in page]}
        if following is not None:
            result["nextCursor"] = following
        return result | _cached(LIST_TTL_MS)

    async def _list_templates(
        self, _caller: Caller, _message: Mapping[str, Any], _emit: Emit | None
    ) -> dict[str, Any]:
        templates = [
            {"uriTemplate": uri, "name": name, "mimeType": mime_type, "description": description}
            for name, (uri, mime_type, description) in TEMPLATES.items()
        ]
        return {"resourceTemplates": templates} | _cached(0)

    async def _read_resource(
        self, caller: Caller, message: Mapping[str, Any], _emit: Emit | None
    ) -> dict[str, Any]:
        uri: str = message["params"]["uri"]
        self.charge(caller.principal, 1)
        absent: dict[str, Any] = {"uri": printable(uri)}
        try:
            content = await self._resources.read_from_any(caller.principal, uri)
        except UnknownNodeError as error:
            content = None
            absent |= {"close": error.close} if error.close else {}
        except (ResourceQueryError, TelemetryQueryError) as error:
            raise MethodError(_INVALID_PARAMS, str(error), absent) from None
        if content is None:
            raise MethodError(_INVALID_PARAMS, "Resource not found", absent)
        self.charge(caller.principal, len(content.text) / BYTES_LIKE_A_CALL)
        return {"contents": [{"uri": uri, "mimeType": content.mime_type, "text": content.text}]} | _cached(0)

    async def _list_prompts(
        self, _caller: Caller, _message: Mapping[str, Any], _emit: Emit | None
    ) -> dict[str, Any]:
        return {"prompts": []} | _cached(0)

    async def _discover_server(
        self, caller: Caller, _message: Mapping[str, Any], _emit: Emit | None
    ) -> dict[str, Any]:
        return self._discover(caller.principal.rights, self.options_of(caller).selection.view)


def _cached(ttl_ms: int) -> dict[str, Any]:
    """Return the caching members of a result: always private to its caller."""
    return {"ttlMs": ttl_ms, "cacheScope": "private"}


def _resource(resource: Resource) -> dict[str, Any]:
    entry = {
        "uri": resource.uri,
        "name": resource.name,
        "mimeType": resource.mime_type,
        "description": resource.description,
    }
    return entry if resource.title is None else entry | {"title": resource.title}
