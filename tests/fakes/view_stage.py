"""A relay with the tools of the views, and nodes with labels."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import pytest
import rfc8785

from relay.calls.results import CallAnswer
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.limits.rate_limits import PER_AGENT, Allowance
from relay.routing.port import LocalRouter
from schemas.labels import NodeName
from schemas.registry import SchemaRegistry, Validator
from tests.fakes.callers import call_of
from tests.fakes.documents import write_contract
from tests.fakes.hub import READ_ONLY, Hub
from tests.fakes.routers import ScriptedRouter
from tests.fakes.seconds import Seconds
from tests.fakes.signer import ECHO, TENANT

OTHER_TENANT = "globex"


class ViewStage:
    """A relay with the tools of the views, whose nodes answer ``system.echo`` at once.

    Attributes:
        kinds, nodes: those that its callers' tokens are for; none: all.
    """

    def __init__(self, hub: Hub, router: LocalRouter | None = None, per_agent: Allowance = PER_AGENT) -> None:
        self.hub = hub
        self.router = ScriptedRouter()
        self.seconds = Seconds()
        self.kinds: tuple[str, ...] = ()
        self.nodes: tuple[str, ...] = ()
        self.gateway = hub.gateway(router or self.router, self.seconds, per_agent)
        hub.make_views()

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
        token = self.hub.token(scopes, tenant=tenant, kinds=self.kinds, nodes=self.nodes)
        request = call_of(token, name, arguments, **(meta or {}))
        return await self.gateway.call(type(request)(request.caller, request.call, None, selection))

    async def result(self, name: str = "sysecho.invoke", **how: Any) -> Mapping[str, Any]:
        answer = await self.call(name, **how)
        assert answer.result is not None, answer.error
        return answer.result

    async def error(self, name: str = "sysecho.invoke", **how: Any) -> Mapping[str, Any]:
        """Return what the call fails with, but for its id."""
        answer = await self.call(name, **how)
        assert answer.error is not None, answer.result
        return {key: value for key, value in answer.error.items() if key != "correlation_id"}


# --- The documents that ship, but for what clamps the shipped kinds to one safety class.


def unclamped_registry(directory: Path) -> SchemaRegistry:
    """Return a registry below ``directory`` by which any capability may have any safety class."""
    documents = directory / "documents"
    write_contract(documents)
    for path in documents.glob("manifest@*.json"):
        manifest = json.loads(path.read_text("utf-8"))
        del manifest["$defs"]["Capability"]["allOf"]
        path.write_text(json.dumps(manifest), "utf-8")
    return SchemaRegistry(documents)


# --- Counts what is done with manifests: how often JSON that holds one is parsed, encoded and validated.


_SIGNED = "node_attestation"


class WorkCounts:
    """The counts since it was made, until ``patch`` is undone.

    Attributes:
        counts: how often a manifest was ``parsed``, ``encoded`` and ``validated``.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        decode, encode, dumps = json.JSONDecoder.raw_decode, json.JSONEncoder.encode, rfc8785.dumps
        is_valid = Validator.is_valid

        def counted_decode(decoder: json.JSONDecoder, text: str, idx: int = 0) -> tuple[Any, int]:
            self._count("parsed", _SIGNED in text)
            return decode(decoder, text, idx)

        def counted_encode(encoder: json.JSONEncoder, value: Any) -> str:
            text = encode(encoder, value)
            self._count("encoded", _SIGNED in text)
            return text

        def counted_dumps(value: Any) -> bytes:
            data = dumps(value)
            self._count("encoded", _SIGNED.encode() in data)
            return data

        def counted_is_valid(validator: Validator, value: object) -> bool:
            self._count("validated", isinstance(value, dict) and _SIGNED in value)
            return is_valid(validator, value)

        patch.setattr(json.JSONDecoder, "raw_decode", counted_decode)
        patch.setattr(json.JSONEncoder, "encode", counted_encode)
        patch.setattr(rfc8785, "dumps", counted_dumps)
        patch.setattr(Validator, "is_valid", counted_is_valid)

    def _count(self, work: str, is_of_a_manifest: bool) -> None:  # noqa: FBT001 - private, and named at no call
        if is_of_a_manifest:
            self.counts[work] += 1


# --- Counts the calls of a function, which runs as it is.


class Calls:
    """The calls of ``module.name`` since it was made, until ``patch`` is undone.

    Attributes:
        count: how many.
    """

    def __init__(self, patch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
        self.count = 0
        function = getattr(module, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return function(*arguments, **options)

        patch.setattr(module, name, counted)
