"""The matrix of scope, safety class and tenant, complete, at the table itself and at every entry point."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from relay.auth.agent_tokens import Principal
from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS, SCOPES, Rights
from relay.fleet.node_names import UnknownNodeError
from relay.fleet.node_record import Where
from relay.fleet.tools import Tool
from relay.mcp_api.resources import ResourceCatalog
from relay.streams.telemetry.resource import TelemetryResource
from schemas.errors import Failure, ToolError
from schemas.kinds import MANIFEST_REF, Kind, KindRegistry, Verb
from schemas.labels import NodeName
from schemas.registry import SCHEME, SchemaRegistry
from tests.fakes.callers import call_of
from tests.fakes.hub import Hub
from tests.fakes.routers import ScriptedRouter
from tests.fakes.shipped_kinds import KINDS
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID
from tests.fakes.suite_kinds import write_documents

OWN, ANOTHER, NO_TENANT = "acme", "globex", ""

READ = "tools:call:read_only"
REVERSE = "tools:call:reversible"
ACTUATE = "tools:call:physical_actuation"
MESSAGE = "sessions:message"
UNKNOWN_SCOPE = "tools:call:harmless"
ALL_SCOPES = (READ, REVERSE, ACTUATE, MESSAGE, UNKNOWN_SCOPE)

UNKNOWN_CLASS = "harmless"
ALL_CLASSES = ("read_only", "reversible", "physical_actuation", UNKNOWN_CLASS)

ALLOWED = {("read_only", READ), ("reversible", REVERSE), ("physical_actuation", ACTUATE)}
"""The rule: a safety class and the one scope that opens it, in the caller's own tenant. No other does."""


def subsets() -> Iterator[tuple[str, ...]]:
    for size in range(len(ALL_SCOPES) + 1):
        yield from combinations(ALL_SCOPES, size)


def kind_called(name: str, *, sensitive: bool = False) -> Kind:
    return Kind(name, name[-8:], "read_only", SCHEME, MappingProxyType({}), sensitive=sensitive)


PLAIN = kind_called("system.echo")
BOARD = (PLAIN, kind_called("linux.units"), kind_called("linux.journal", sensitive=True))

EVERY_SET = [pytest.param(scopes, id=" ".join(scopes) or "none") for scopes in subsets()]


def may(scopes: tuple[str, ...], safety_class: str, caller: str, owner: str) -> bool:
    return caller == owner and any((safety_class, scope) in ALLOWED for scope in scopes)


# --- the table ----------------------------------------------------------------------------------------


def test_the_walk_is_complete() -> None:
    assert len(EVERY_SET) == 2 ** len(ALL_SCOPES)
    assert set(SCOPES) == set(ALL_SCOPES) - {UNKNOWN_SCOPE}
    assert set(SCOPE_OF_SAFETY_CLASS.items()) == ALLOWED


@pytest.mark.parametrize("scopes", EVERY_SET)
@pytest.mark.parametrize("safety_class", ALL_CLASSES)
def test_a_tool_is_reached_with_the_scope_of_its_class_in_its_own_tenant_and_not_otherwise(
    scopes: tuple[str, ...], safety_class: str
) -> None:
    for caller in (OWN, ANOTHER, NO_TENANT):
        rights = Rights.of(caller, frozenset(scopes))
        for owner in (OWN, ANOTHER, NO_TENANT):
            assert rights.allow(owner, safety_class, PLAIN) is may(scopes, safety_class, caller, owner), (
                caller,
                owner,
            )


@pytest.mark.parametrize("scopes", EVERY_SET)
def test_reading_resources_needs_what_reading_a_tool_needs(scopes: tuple[str, ...]) -> None:
    assert Rights.of(OWN, scopes).may_read is (READ in scopes)


@pytest.mark.parametrize(
    ("kinds", "admitted"),
    [
        (None, ["system.echo", "linux.units"]),
        (("*",), ["system.echo", "linux.units"]),
        (("linux.*",), ["linux.units"]),
        (("*", "!system.*"), ["linux.units"]),
        (("linux.*", "linux.journal"), ["linux.units", "linux.journal"]),
        (("linux.journal",), ["linux.journal"]),
        (("linux.journa*",), []),
        (("linux.journal", "!linux.*"), []),
    ],
)
def test_a_token_is_for_the_kinds_that_it_names_and_a_sensitive_one_is_named_in_full(
    kinds: tuple[str, ...] | None, admitted: list[str]
) -> None:
    rights = Rights.of(OWN, {READ}, kinds)
    assert [kind.name for kind in BOARD if rights.allow(OWN, "read_only", kind)] == admitted
    assert not any(Rights.of(OWN, (), kinds).allow(OWN, "read_only", kind) for kind in BOARD)
    assert not any(rights.allow(ANOTHER, "read_only", kind) for kind in BOARD)


GREENHOUSE = NodeName(OWN, "Greenhouse Pi", ("greenhouse", "site=north"))
BARN = NodeName(OWN, "Gewächshaus [2]", ("site=south",))


@pytest.mark.parametrize(
    ("nodes", "admitted"),
    [
        (None, ["greenhouse", "barn", "unnamed"]),
        (("*",), ["greenhouse", "barn", "unnamed"]),
        (("tag:greenhouse",), ["greenhouse"]),
        (("tag:site=*",), ["greenhouse", "barn"]),
        (("site=s*",), ["barn"]),
        (("tag:*", "!site=north"), ["barn"]),
        (("*", "!tag:green*"), ["barn", "unnamed"]),
        (("greenhouse pi",), ["greenhouse"]),
        (("GREEN*",), ["greenhouse"]),
        (("greenhouse",), []),  # a tag is none without its mark
        (("xn--Gewchshaus_[2]-*",), ["barn"]),
        (("xn--Gewchshaus_?2?-*",), []),  # only * stands for others
        ((NODE_ID,), ["greenhouse"]),
        ((f"{NODE_ID[:25]}*",), ["greenhouse"]),
        ((NODE_ID[:10],), []),
        ((NODE_ID, f"!{NODE_ID}"), []),
        (("!site=north",), []),
    ],
)
def test_a_token_is_for_the_nodes_that_it_names_by_id_label_and_tag(
    nodes: tuple[str, ...] | None, admitted: list[str]
) -> None:
    rights = Rights.of(OWN, {READ}, nodes=nodes)
    board = {
        "greenhouse": (NODE_ID, GREENHOUSE),
        "barn": ("6" * 26, BARN),
        "unnamed": ("7" * 26, NodeName(OWN)),
    }
    assert [name for name, node in board.items() if rights.admit_node(*node)] == admitted


def test_callers_who_reach_the_same_are_one_audience() -> None:
    plain, more = Rights.of(OWN, {READ}), Rights.of(OWN, {READ, UNKNOWN_SCOPE})
    assert plain == more
    others = {Rights.of(ANOTHER, {READ}), Rights.of(OWN, {READ, REVERSE}), Rights.of(OWN, {READ, MESSAGE})}
    assert len({plain, more} | others) == 4


@pytest.mark.parametrize("scopes", EVERY_SET)
def test_messages_need_their_own_scope_alone(scopes: tuple[str, ...]) -> None:
    assert Rights.of(OWN, scopes).may_message is (MESSAGE in scopes)


@pytest.mark.parametrize(
    "scope",
    ["", "tools:call", "tools:call:", READ.upper(), f"{READ} ", f" {READ}", f"{READ}:x", "read_only", "*"],
)
def test_what_only_resembles_a_scope_allows_nothing(scope: str) -> None:
    assert Rights.of(OWN, {scope}) == Rights.of(OWN, ())
    assert not any(Rights.of(OWN, {scope}).allow(OWN, safety_class, PLAIN) for safety_class in ALL_CLASSES)


def test_a_text_is_not_taken_for_the_scopes_that_it_contains() -> None:
    # What a token names is split before it comes here; the whole of it is none.
    assert Rights.of(OWN, {f"{READ} {REVERSE}"}).safety_classes == frozenset()


# --- every entry point --------------------------------------------------------------------------------

_INPUT, _OUTPUT = "test.text.invoke.input@1.0.0", "test.invoke.output@1.0.0"
_SHORT = dict(zip(ALL_CLASSES, ("reads", "reverses", "actuates", "harmless"), strict=True))


def _kind(safety_class: str) -> Kind:
    short = _SHORT[safety_class]
    verb = Verb("invoke", _INPUT, _OUTPUT, "A tool", "Does something.", idempotent=True)
    return Kind(f"matrix.{short}", short, safety_class, SCHEME + _INPUT, MappingProxyType({"invoke": verb}))


_PRIVATE = replace(_kind("read_only"), name="matrix.private", short="private", sensitive=True)
# One kind of each class that there is, one of a class that this relay does not know, and a sensitive one.
_MATRIX = [*(_kind(safety_class) for safety_class in ALL_CLASSES), _PRIVATE]


def _admit(directory: Path) -> None:
    """Let the contract in ``directory`` admit the kinds of the matrix."""
    path = directory / f"{MANIFEST_REF}.json"
    manifest = json.loads(path.read_text("utf-8"))
    capability = manifest["$defs"]["Capability"]
    capability["properties"]["safety_class"]["enum"] = list(ALL_CLASSES)
    capability["properties"]["kind"]["enum"] += [kind.name for kind in _MATRIX]
    path.write_text(json.dumps(manifest), "utf-8")


def _capability(kind: Kind) -> dict[str, Any]:
    return {
        "cap_id": kind.short,
        "kind": kind.name,
        "schema_ref": kind.schema_ref,
        "verbs": ["invoke"],
        "safety_class": kind.safety_class,
        "constraints": {"rate_limit_rps": 50, "max_concurrency": 4, "deadline_ms_default": 2000},
    }


@pytest.fixture(scope="module")
def amended(tmp_path_factory: pytest.TempPathFactory) -> SchemaRegistry:
    directory = tmp_path_factory.mktemp("matrix") / "documents"
    write_documents(directory)
    _admit(directory)
    return SchemaRegistry(directory)


class EntryPoints:
    """One node of one tenant with a tool of every safety class, and every way to it."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.router = ScriptedRouter(
            lambda command: {"ok": True, "result": {"node_id": command.node_id, "text": "done"}}
        )
        self.seconds = 0.0
        self.gateway = hub.gateway(self.router, self._later)
        self.catalog = ResourceCatalog(hub.fleet, hub.registry, TelemetryResource(hub.telemetry, hub.fleet))
        self.node = hub.ca.issue(NODE_ID, OWN)
        hub.connect(self.node, capabilities=[_capability(kind) for kind in _MATRIX])

    def _later(self) -> float:
        # No rate is in the way of a walk.
        self.seconds += 60
        return self.seconds

    def listed(self, tenant: str, scopes: tuple[str, ...]) -> set[str]:
        return {tool.canonical for tool in self.hub.fleet.selected.listed(Rights.of(tenant, scopes))}

    def resolved(self, name: str, tenant: str, scopes: tuple[str, ...]) -> Tool | Failure:
        try:
            return self.hub.fleet.resolve(name, Rights.of(tenant, scopes))
        except ToolError as error:
            return error.failure

    async def called(self, name: str, tenant: str, scopes: tuple[str, ...]) -> dict[str, Any]:
        token = self.hub.token(scopes, tenant=tenant)
        answer = await self.gateway.call(call_of(token, name, {}))
        return dict(answer.error or {"result": answer.result})

    async def read(self, uri: str, tenant: str, scopes: tuple[str, ...]) -> str | None:
        with suppress(UnknownNodeError):
            content = await self.catalog.read(_principal(tenant, scopes), uri)
            return content.text if content else None
        return None


def _principal(tenant: str, scopes: tuple[str, ...]) -> Principal:
    return Principal(tenant, "agent-1", "jti-1", "https://relay.example", frozenset(scopes), 0, "kid-1", b"")


def name_of(safety_class: str, node_id: str = NODE_ID) -> str:
    return f"{_SHORT[safety_class]}.{node_id}.{_SHORT[safety_class]}.invoke"


@pytest.fixture
def entries(tmp_path: Path, amended: SchemaRegistry) -> Iterator[EntryPoints]:
    hub = Hub(tmp_path, amended, kinds=KindRegistry([*KINDS, *_MATRIX]))
    yield EntryPoints(hub)
    hub.close()


@pytest.mark.parametrize("tenant", [pytest.param(OWN, id="own"), pytest.param(ANOTHER, id="another")])
@pytest.mark.parametrize("scopes", EVERY_SET)
async def test_listing_resolving_and_calling_never_disagree(
    entries: EntryPoints, scopes: tuple[str, ...], tenant: str
) -> None:
    reached = {name_of(each) for each in ALL_CLASSES if may(scopes, each, tenant, OWN)}
    assert entries.listed(tenant, scopes) == reached
    for safety_class in ALL_CLASSES:
        name = name_of(safety_class)
        resolved = entries.resolved(name, tenant, scopes)
        if name in reached:
            assert isinstance(resolved, Tool)
            assert resolved.canonical == name
        else:
            assert resolved is Failure.SAFETY_DENIED
    if scopes:  # a token names at least one
        for safety_class in ALL_CLASSES:
            answer = await entries.called(name_of(safety_class), tenant, scopes)
            assert answer.get("code") == (None if name_of(safety_class) in reached else "E_SAFETY_DENIED")
        assert {command.tool for command in entries.router.commands} == reached


def test_a_tenant_without_a_name_owns_nothing(entries: EntryPoints) -> None:
    assert entries.listed(NO_TENANT, ALL_SCOPES) == set()
    assert entries.resolved(name_of("read_only"), NO_TENANT, ALL_SCOPES) is Failure.SAFETY_DENIED


@pytest.mark.parametrize("tenant", [pytest.param(OWN, id="own"), pytest.param(ANOTHER, id="another")])
@pytest.mark.parametrize("scopes", EVERY_SET)
async def test_what_is_read_is_the_tenants_own_and_for_who_may_read(
    entries: EntryPoints, scopes: tuple[str, ...], tenant: str
) -> None:
    mine = tenant == OWN and READ in scopes
    uris = [resource["uri"] for resource in entries.catalog.listed(_principal(tenant, scopes))[0]]
    of_the_node = [f"node://{NODE_ID}/manifest", f"node://{NODE_ID}/identity"]
    of_the_fleet = ["fleet://nodes", "fleet://changes"]
    assert uris == ([*of_the_fleet, *(of_the_node if mine else [])] if READ in scopes else [])
    for uri in of_the_node:
        assert (await entries.read(uri, tenant, scopes) is not None) is mine
    nodes = await entries.read("fleet://nodes", tenant, scopes)
    assert (nodes is not None) is (READ in scopes)
    assert (NODE_ID in (nodes or "")) is mine


@pytest.mark.parametrize("scopes", [scopes for scopes in EVERY_SET if scopes.id != "none"])
async def test_another_tenants_node_answers_byte_for_byte_as_one_that_exists_nowhere(
    entries: EntryPoints, scopes: tuple[str, ...]
) -> None:
    names = [name_of(safety_class, node) for safety_class in ALL_CLASSES for node in (NODE_ID, OTHER_NODE_ID)]
    names += [
        f"sysecho.{NODE_ID}.one.invoke",
        f"gpio.{NODE_ID}.led.set",
        f"sysecho.{OTHER_NODE_ID}.one.invoke",
    ]
    texts = set()
    for name in [*names, *(name.replace(".", "-") for name in names)]:
        answer = await entries.gateway.call(call_of(entries.hub.token(scopes, tenant=ANOTHER), name, {}))
        assert answer.error is not None
        texts.add(answer.text.replace(answer.error["correlation_id"], ""))
    assert len(texts) == 1
    assert json.loads(texts.pop())["code"] == "E_SAFETY_DENIED"
    assert entries.router.commands == []
    theirs, nowhere = (f"node://{node}/manifest" for node in (NODE_ID, OTHER_NODE_ID))
    for uri in (theirs, nowhere):
        assert await entries.read(uri, ANOTHER, scopes) is None


async def test_the_state_of_a_node_of_another_tenant_does_not_show(entries: EntryPoints) -> None:
    async def seen() -> str:
        answer = await entries.gateway.call(
            call_of(entries.hub.token(ALL_SCOPES[:4], tenant=ANOTHER), name_of("read_only"), {})
        )
        assert answer.error is not None
        return answer.text.replace(answer.error["correlation_id"], "")

    texts = [await seen()]
    entries.hub.fleet.offer_manifest(NODE_ID, b"{}", "broker")  # rejected
    texts.append(await seen())
    entries.hub.fleet.connection_changed(NODE_ID, Where.NOWHERE)
    entries.hub.fleet.tombstone(NODE_ID)
    texts.append(await seen())
    entries.hub.announce(entries.node, issued_at_ms=entries.hub.clock.advance(1))
    entries.hub.fleet.drop_leaves(lambda leaf: leaf.kid == entries.node.kid)
    texts.append(await seen())
    assert len(set(texts)) == 1


def test_a_sensitive_kind_is_listed_and_resolved_for_a_token_that_names_it_alone(
    entries: EntryPoints,
) -> None:
    name = f"private.{NODE_ID}.private.invoke"
    selected, fleet = entries.hub.fleet.selected, entries.hub.fleet
    for kinds in (None, ("*",), ("matrix.reads",)):
        rights = Rights.of(OWN, {READ}, kinds)
        assert name not in {tool.canonical for tool in selected.listed(rights)}
        with pytest.raises(ToolError) as caught:
            fleet.resolve(name, rights)
        assert caught.value.failure is Failure.SAFETY_DENIED
    named = Rights.of(OWN, {READ}, (_PRIVATE.name,))
    assert [tool.canonical for tool in selected.listed(named)] == [name]
    assert fleet.resolve(name, named).canonical == name
