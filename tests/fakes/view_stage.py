"""A relay with the tools of the views, and nodes with labels."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

from relay.calls.call_record import CallAnswer
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.limits.rate_limits import Allowance
from relay.routing.port import LocalRouter
from relay.settings.config import PER_AGENT
from relay.state.names import NodeName
from tests.fakes.callers import call_of
from tests.fakes.hub import READ_ONLY, Hub
from tests.fakes.routers import ScriptedRouter
from tests.fakes.seconds import Seconds
from tests.fakes.signer import ECHO, TENANT

OTHER_TENANT = "globex"


class ViewStage:
    """A relay with the tools of the views, whose nodes answer ``system.echo`` at once."""

    def __init__(self, hub: Hub, router: LocalRouter | None = None, per_agent: Allowance = PER_AGENT) -> None:
        self.hub = hub
        self.router = ScriptedRouter()
        self.seconds = Seconds()
        self.gateway = hub.gateway(router or self.router, self.seconds, per_agent)
        hub.views(self.gateway, self.seconds)

    def node(self, name: str, *tags: str, tenant: str = TENANT, **members: Any) -> str:
        """Connect a node whose label is ``name``, and return its id."""
        node_id = f"01hzx9k3m4p7q8r9s0t1{crc32(name.encode()) % 10**6:06}"
        members = {"capabilities": [ECHO]} | members
        self.hub.connect(self.hub.ca.issue(node_id, tenant=tenant), **members)
        self.hub.fleet.rename({node_id: NodeName(tenant, name, tuple(sorted(tags)))})
        return node_id

    async def call(
        self,
        name: str = "sysecho.invoke",
        *,
        scopes: tuple[str, ...] = (READ_ONLY,),
        selection: Selection = WHOLE_FLEET,
        tenant: str = TENANT,
        meta: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> CallAnswer:
        """Call a tool of a view, by default an echo of ``ping``."""
        if name == "sysecho.invoke":
            arguments = {"message": "ping"} | arguments
        request = call_of(self.hub.token(scopes, tenant=tenant), name, arguments, **(meta or {}))
        return await self.gateway.call(type(request)(request.caller, request.call, None, selection))

    async def result(self, name: str = "sysecho.invoke", **how: Any) -> Mapping[str, Any]:
        """Return what the call returns."""
        answer = await self.call(name, **how)
        assert answer.result is not None, answer.error
        return answer.result

    async def error(self, name: str = "sysecho.invoke", **how: Any) -> Mapping[str, Any]:
        """Return what the call fails with, but for its id."""
        answer = await self.call(name, **how)
        assert answer.error is not None, answer.result
        return {key: value for key, value in answer.error.items() if key != "correlation_id"}
