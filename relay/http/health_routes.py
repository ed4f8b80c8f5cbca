"""``/healthz`` and ``/readyz``: whether the relay is live, and whether calls can be made.

Public, as the relay's port is: they name subsystems, and must not name agents or nodes.
"""

from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from schemas.health import Health


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
