"""The relay's other HTTP routes: schemas, health, metrics, the OAuth metadata.

Must not serve agents or nodes: ``mcp_api`` and ``sessions`` do.
"""

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from relay.auth.permissions import SCOPES
from relay.http.connections import Bounds
from relay.http.front_page import FrontPage
from relay.http.http_protocol import WholeRequest
from relay.http.request_guard import METADATA_PATHS, METRICS_PATH
from relay.http.websocket_protocol import BoundedWebSocket
from relay.observability.metrics import Metrics
from schemas.addresses import mcp_url
from schemas.canonical import blake3_hex
from schemas.health import Health
from schemas.registry import SchemaRegistry

_YEAR_S = 31_536_000


def make_routes(  # noqa: PLR0913 - what comes in from outside
    *,
    public_url: str,
    registry: SchemaRegistry,
    metrics: Metrics,
    health: Callable[[], Mapping[str, Health]],
    running: Callable[[], AbstractAsyncContextManager[None]],
    issuers: Sequence[str] = (),
    more: Sequence[Route] = (),
) -> Starlette:
    """Return the application; ``running`` is entered while it serves.

    ``issuers`` are the authorization servers from which agents can get tokens; without one there is no
    metadata for them to read. ``more`` are the routes of other modules.
    """
    documents = registry.documents
    front = FrontPage(public_url, issuers)

    async def list_schemas(_request: Request) -> Response:
        return JSONResponse({"schemas": sorted(documents)})

    async def get_schema(request: Request) -> Response:
        # A dictionary look-up, never a path: no name can lead to another file.
        document = documents.get(request.path_params["ref"])
        if document is None:
            return JSONResponse({"error": "no such schema; GET /schemas/ lists them"}, status_code=404)
        etag = f'"{blake3_hex(document)}"'
        headers = {"etag": etag, "cache-control": f"public, max-age={_YEAR_S}, immutable"}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(document, media_type="application/schema+json", headers=headers)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with running():
            yield

    routes = [
        Route("/", front.show),
        Route("/schemas/", list_schemas),
        Route("/schemas/{ref}", get_schema),
        *health_routes(health),
        metrics_route(metrics),
        *(resource_metadata_routes(public_url, issuers) if issuers else ()),
        *more,
    ]
    unserved = {404: front.refuse, 405: front.refuse}
    application = Starlette(routes=routes, lifespan=lifespan, exception_handlers=unserved)
    # An unknown path is 404. Starlette would redirect the client to another, by http.
    application.router.redirect_slashes = False
    return application


def resource_metadata_routes(public_url: str, issuers: Sequence[str]) -> list[Route]:
    """Return the routes of the metadata of each path of MCP (RFC 9728), which name ``issuers``."""

    async def resource_metadata(request: Request) -> Response:
        return JSONResponse(_metadata(mcp_url(public_url, METADATA_PATHS[request.scope["path"]]), issuers))

    return [Route(path, resource_metadata) for path in METADATA_PATHS]


def _metadata(resource: str, issuers: Sequence[str]) -> dict[str, Any]:
    return {
        "resource": resource,
        "resource_name": "Edge relay",
        "scopes_supported": list(SCOPES),
        "bearer_methods_supported": ["header"],
        "authorization_servers": list(issuers),
    }


def health_routes(health: Callable[[], Mapping[str, Health]]) -> list[Route]:
    """Return the two routes; ``health`` returns that of every subsystem that calls need."""

    async def healthz(_request: Request) -> Response:
        if stalled := [name for name, part in health().items() if not part.live]:
            return JSONResponse({"status": "stalled", "stalled": stalled}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def readyz(_request: Request) -> Response:
        parts = health()
        ready = all(part.lets_calls_flow for part in parts.values())
        shown = {name: part.to_json() for name, part in parts.items()}
        return JSONResponse({"ready": ready, "subsystems": shown}, status_code=200 if ready else 503)

    return [Route("/healthz", healthz), Route("/readyz", readyz)]


if TYPE_CHECKING:
    from starlette.types import ASGIApp

METRICS_CONNECTIONS = Bounds(total=17, unauthenticated=16, per_address=16, per_holder=16)
"""Nothing here authenticates; where 16 are open, one whose request is incomplete is closed for a new one."""

_OUR_HOST = re.compile(r"(?:127(?:\.[0-9]{1,3}){3}|localhost|\[::1\])(?::[0-9]{1,5})?", re.IGNORECASE)


def metrics_route(metrics: Metrics) -> Route:
    """Return the route of the page, in Prometheus' text format."""

    async def show(_request: Request) -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    return Route(METRICS_PATH, show)


class MetricsPage:
    """The application that ``metrics_listen`` serves: /metrics alone, to programs of this machine.

    A web page can make its browser send requests to a loopback address under a name of the page's choice (DNS
    rebinding), so only loopback's names are answered, with any port: an operator may come through a tunnel. A
    browser cannot open a Unix socket. Must not serve anything that the public listener does.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._routes = Starlette(routes=[metrics_route(metrics)])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        application: ASGIApp = self._routes
        if scope["type"] == "http" and scope.get("client"):  # over a Unix socket no client has an address
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if len(hosts) != 1 or not _OUR_HOST.fullmatch(hosts[0].strip(" \t")):
                application = PlainTextResponse("This server has another name.\n", status_code=421)
        await application(scope, receive, send)

    def begin(self, _request: WholeRequest) -> None:
        """Leave each request to ASGI."""

    async def serve_socket(self, socket: BoundedWebSocket) -> None:
        socket.reject()
