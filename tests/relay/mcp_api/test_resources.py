import json

import pytest

from relay.auth.agent_tokens import Principal
from relay.mcp_api.resources import JSON, PEM, TEMPLATES, ResourceCatalog
from schemas.identity import kid_of
from schemas.manifest import etag_of
from schemas.registry import SchemaRegistry
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, TTL_MS, SimulatedNode

MANIFEST = f"node://{NODE_ID}/manifest"
IDENTITY = f"node://{NODE_ID}/identity"
SCHEMA = "schema://system.echo.invoke.input@1.0.0"


def principal(tenant: str = TENANT, *scopes: str) -> Principal:
    return Principal(
        tenant,
        "agent-1",
        "jti-1",
        "https://relay.example",
        frozenset(scopes or ["tools:call:read_only"]),
        0,
        "kid-1",
        b"",
    )


@pytest.fixture
def node(hub: Hub) -> SimulatedNode:
    return hub.ca.issue()


@pytest.fixture
def catalog(hub: Hub, registry: SchemaRegistry) -> ResourceCatalog:
    return ResourceCatalog(hub.fleet, registry)


def uris(catalog: ResourceCatalog, who: Principal) -> list[str]:
    return [resource.uri for resource in catalog.listed(who)]


def text(catalog: ResourceCatalog, uri: str, who: Principal | None = None) -> str:
    content = catalog.read(who or principal(), uri)
    assert content is not None
    return content.text


def test_a_manifest_is_the_signed_bytes_themselves(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog
) -> None:
    wire = hub.connect(node)
    content = catalog.read(principal(), MANIFEST)
    assert content is not None
    assert (content.mime_type, content.text.encode()) == (JSON, wire)


def test_an_identity_is_the_leaf_that_the_manifest_was_signed_with(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog
) -> None:
    hub.connect(node)
    content = catalog.read(principal(), IDENTITY)
    assert content is not None
    assert content.mime_type == PEM
    assert content.text == node.leaf_pem
    assert json.loads(text(catalog, MANIFEST))["node_attestation"]["kid"] == node.kid
    assert len(kid_of(b"")) == len(node.kid)


def test_the_nodes_are_listed_with_what_is_known_of_them(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog
) -> None:
    wire = hub.connect(node)
    hub.fleet.offer_identity(OTHER_NODE_ID, hub.ca.issue(OTHER_NODE_ID).leaf_pem)
    assert json.loads(text(catalog, "fleet://nodes"))["nodes"] == [
        {
            "node_id": NODE_ID,
            "connected": True,
            "manifest_etag": etag_of(wire),
            "expires_at_ms": NOW_MS + TTL_MS,
            "tools": [f"sys.{NODE_ID}.sysmetrics.snapshot", f"sysecho.{NODE_ID}.echo.invoke"],
        },
        {
            "node_id": OTHER_NODE_ID,
            "connected": False,
            "manifest_etag": None,
            "expires_at_ms": None,
            "tools": [],
        },
    ]


def test_every_schema_can_be_read(catalog: ResourceCatalog, registry: SchemaRegistry) -> None:
    for ref, document in registry.documents.items():
        assert text(catalog, f"schema://{ref}").encode() == document


def test_all_that_is_listed_can_be_read(hub: Hub, node: SimulatedNode, catalog: ResourceCatalog) -> None:
    hub.connect(node)
    assert uris(catalog, principal()) == ["fleet://nodes", MANIFEST, IDENTITY]
    for resource in catalog.listed(principal()):
        content = catalog.read(principal(), resource.uri)
        assert content is not None
        assert content.mime_type == resource.mime_type


def test_a_node_without_a_manifest_has_nothing_to_read(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog
) -> None:
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert uris(catalog, principal()) == ["fleet://nodes"]
    assert catalog.read(principal(), MANIFEST) is None
    assert catalog.read(principal(), IDENTITY) is None


def test_another_tenants_nodes_do_not_exist(hub: Hub, node: SimulatedNode, catalog: ResourceCatalog) -> None:
    hub.connect(node)
    other_tenant = principal("globex")
    assert uris(catalog, other_tenant) == ["fleet://nodes"]
    assert json.loads(text(catalog, "fleet://nodes", other_tenant)) == {"nodes": []}
    assert catalog.read(other_tenant, MANIFEST) is None
    assert catalog.read(other_tenant, IDENTITY) is None


@pytest.mark.parametrize(
    "scope", ["sessions:message", "tools:call:reversible", "tools:call:physical_actuation"]
)
def test_reading_needs_the_scope_that_reading_a_tool_needs(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog, scope: str
) -> None:
    hub.connect(node)
    who = principal(TENANT, scope)
    assert uris(catalog, who) == []
    for uri in ("fleet://nodes", MANIFEST, IDENTITY, SCHEMA):
        assert catalog.read(who, uri) is None


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "fleet://",
        "fleet://nodes/",
        "fleet:nodes",
        f"node://{NODE_ID}",
        f"node://{NODE_ID}/",
        f"node://{NODE_ID}/key",
        f"node://{NODE_ID}/manifest/",
        f"node://{NODE_ID.upper()}/manifest",
        f"node://{OTHER_NODE_ID}/manifest",
        "schema://nothing@1.0.0",
        "schema://../registry.py",
        f"{SCHEMA}/",
        "file:///etc/passwd",
        "http://relay.example/",
    ],
)
def test_what_there_is_not_cannot_be_read(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog, uri: str
) -> None:
    hub.connect(node)
    assert catalog.read(principal(), uri) is None


def test_each_template_names_what_can_be_read(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog
) -> None:
    hub.connect(node)
    fillings = {"node_id": NODE_ID, "kind": "system.metrics", "semver": "1.0.0"}
    for template, mime_type, _description in TEMPLATES.values():
        content = catalog.read(principal(), template.format_map(fillings))
        assert content is not None
        assert content.mime_type == mime_type
