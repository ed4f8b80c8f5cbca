"""The relay's other HTTP routes: schemas, health, metrics and the OAuth metadata.

Must not serve agents or nodes: ``mcp_api`` and ``sessions`` do.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from relay.auth.permissions import SCOPES
from relay.http.front_page import FrontPage
from relay.http.request_guard import METADATA_PATHS, METRICS_PATH
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

    async def show_metrics(_request: Request) -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    async def resource_metadata(request: Request) -> Response:
        return JSONResponse(_metadata(mcp_url(public_url, METADATA_PATHS[request.scope["path"]]), issuers))

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with running():
            yield

    routes = [
        Route("/", front.show),
        Route("/schemas/", list_schemas),
        Route("/schemas/{ref}", get_schema),
        *health_routes(health),
        Route(METRICS_PATH, show_metrics),
        *(Route(path, resource_metadata) for path in METADATA_PATHS if issuers),
        *more,
    ]
    unserved = {404: front.refuse, 405: front.refuse}
    application = Starlette(routes=routes, lifespan=lifespan, exception_handlers=unserved)
    # An unknown path is 404. Starlette would redirect the client to another, by http.
    application.router.redirect_slashes = False
    return application


def _metadata(resource: str, issuers: Sequence[str]) -> dict[str, Any]:
    """Return the metadata of the resource (RFC 9728)."""
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
