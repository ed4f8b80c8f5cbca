"""The relay's other HTTP routes: schemas, health, metrics and the OAuth metadata.

Must not serve agents or nodes: those are ``mcp_server`` and ``sessions``.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from relay.auth import SCOPES
from relay.guard import METADATA_PATH, METRICS_PATH
from relay.meters import Meters
from schemas.addresses import mcp_url
from schemas.canonical import blake3_hex
from schemas.registry import SchemaRegistry

_YEAR_S = 31_536_000


def make_routes(
    *,
    public_url: str,
    registry: SchemaRegistry,
    meters: Meters,
    readiness: Callable[[], Mapping[str, bool]],
    running: Callable[[], AbstractAsyncContextManager[None]],
) -> Starlette:
    """Return the application; ``running`` is entered for as long as it serves."""
    documents = registry.documents
    etags = {ref: f'"{blake3_hex(document)}"' for ref, document in documents.items()}

    async def list_schemas(_request: Request) -> Response:
        return JSONResponse({"schemas": sorted(documents)})

    async def get_schema(request: Request) -> Response:
        # A dictionary look-up, never a path: whatever the name is, it can only be one of ours.
        document = documents.get(request.path_params["ref"])
        if document is None:
            return JSONResponse({"error": "no such schema; GET /schemas/ lists them"}, status_code=404)
        etag = etags[request.path_params["ref"]]
        headers = {"etag": etag, "cache-control": f"public, max-age={_YEAR_S}, immutable"}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(document, media_type="application/schema+json", headers=headers)

    async def healthz(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(_request: Request) -> Response:
        parts = dict(readiness())
        ready = all(parts.values())
        return JSONResponse({"ready": ready, "subsystems": parts}, status_code=200 if ready else 503)

    async def metrics(_request: Request) -> Response:
        return Response(meters.render(), media_type="text/plain; version=0.0.4")

    async def resource_metadata(_request: Request) -> Response:
        metadata: dict[str, Any] = {
            "resource": mcp_url(public_url),
            "scopes_supported": list(SCOPES),
            "bearer_methods_supported": ["header"],
        }
        return JSONResponse(metadata)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with running():
            yield

    routes = [
        Route("/schemas/", list_schemas),
        Route("/schemas/{ref}", get_schema),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route(METRICS_PATH, metrics),
        Route(METADATA_PATH, resource_metadata),
    ]
    return Starlette(routes=routes, lifespan=lifespan)
