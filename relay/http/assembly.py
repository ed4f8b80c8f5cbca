"""Assembles what the relay's one port serves: the request guard, and the routes behind it.

Must not decide anything: it constructs the parts and connects them.
"""

import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from starlette.routing import Route
from starlette.types import ASGIApp

from relay.audit.assembly import AuditPart
from relay.auth.assembly import AuthPart
from relay.http.connections import Bounds, Connections, refusal_log
from relay.http.front_page import FrontPage
from relay.http.request_guard import AllowedHosts, BeginMcp, RequestGuard
from relay.http.routes import make_routes
from relay.part import Part
from relay.settings.environment import RelayEnvironment
from schemas.health import Health


@dataclass(frozen=True, slots=True)
class Served:
    """What other packages serve.

    Attributes:
        mcp: the application behind the paths of MCP, and ``running`` the context in which it can serve.
        mcp_direct: what answers some of its requests without ASGI.
        node_sessions: the application behind ``/devices/connect``.
        routes: further routes.
        health: what ``/healthz`` and ``/readyz`` show.
    """

    mcp: ASGIApp
    mcp_direct: BeginMcp
    running: Callable[[], AbstractAsyncContextManager[None]]
    node_sessions: ASGIApp
    routes: Sequence[Route]
    health: Callable[[], Mapping[str, Health]]


@dataclass(frozen=True, slots=True)
class HttpPart(Part):
    """The ASGI application of the whole relay, and the connections that it is served on."""

    application: RequestGuard
    connections: Connections


def assemble(environment: RelayEnvironment, audit: AuditPart, auth: AuthPart, served: Served) -> HttpPart:
    """Return the part, which serves ``served``."""
    config = environment.config
    issuers = [config.external_issuer.issuer] if config.external_issuer else []
    routes = make_routes(
        public_url=config.public_url,
        registry=environment.registry,
        metrics=environment.metrics,
        health=served.health,
        running=served.running,
        issuers=issuers,
        more=served.routes,
    )
    application = RequestGuard(
        allowed=AllowedHosts.of(config.public_url, config.listen, tls=config.tls is not None),
        authenticator=auth.authenticator,
        metadata_of=config.public_url if config.external_issuer else None,
        metrics=environment.metrics,
        refusals=audit.refusals,
        mcp=served.mcp,
        mcp_direct=served.mcp_direct,
        node_sessions=served.node_sessions,
        other=routes,
        page=FrontPage(config.public_url, issuers).page,
    )
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    bounds = Bounds.below(descriptors)
    connections = Connections(
        bounds,
        environment.metrics.connections_refused,
        on_refused=refusal_log(environment.log, bounds, descriptors),
    )
    return HttpPart(application, connections)
