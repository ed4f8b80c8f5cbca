"""What a fleet lists and resolves, for callers who may only read."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from relay.auth.permissions import Rights
from schemas.errors import Failure, ToolError
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, TENANT

ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
METRICS_NAME = f"sys.{NODE_ID}.sysmetrics.snapshot"
READ_ONLY = frozenset({"read_only"})
OTHER_TENANT = "globex"


@dataclass
class NodesOfTenants:
    """Nodes of which the tenant is all that is known."""

    tenants: dict[str, str]

    def ids_of(self, tenant: str) -> Sequence[str]:
        return sorted(node_id for node_id, its in self.tenants.items() if its == tenant)

    def tenant_of(self, node_id: str) -> str | None:
        return self.tenants.get(node_id)


def listed(hub: Hub, tenant: str = TENANT) -> list[str]:
    return [tool.canonical for tool in hub.fleet.selected.listed(Rights(tenant, READ_ONLY))]


def failure(hub: Hub, name: str, tenant: str = TENANT) -> Failure:
    with pytest.raises(ToolError) as caught:
        hub.fleet.resolve(name, Rights(tenant, READ_ONLY))
    return caught.value.failure
