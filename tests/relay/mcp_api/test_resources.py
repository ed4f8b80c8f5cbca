import asyncio
import json

import pytest

from relay.auth.agent_tokens import Principal
from relay.fleet.fleet import GRACE_MS
from relay.fleet.node_names import UnknownNodeError
from relay.fleet.node_record import Where
from relay.mcp_api.resources import (
    JSON,
    MAX_PAGE_BYTES,
    PEM,
    TEMPLATES,
    Content,
    ResourceCatalog,
    ResourceQueryError,
)
from relay.mcp_api.tool_list import CursorError
from relay.streams.telemetry.resource import TelemetryResource
from schemas.identity import kid_of
from schemas.labels import NodeName
from schemas.manifest import etag_of
from schemas.registry import SchemaRegistry
from schemas.times import iso
from tests.fakes.callers import principal
from tests.fakes.hub import Hub
from tests.fakes.signer import (
    DAY_MS,
    ECHO,
    NODE_ID,
    NOW_MS,
    OTHER_NODE_ID,
    TENANT,
    TTL_MS,
    SimulatedNode,
    key_named,
)

MANIFEST = f"node://{NODE_ID}/manifest"
IDENTITY = f"node://{NODE_ID}/identity"
OF_THE_FLEET = ["fleet://nodes", "fleet://changes"]
SCHEMA = "schema://system.echo.invoke.input@1.0.0"


@pytest.fixture
def node(hub: Hub) -> SimulatedNode:
    return hub.ca.issue()


@pytest.fixture
def catalog(hub: Hub, registry: SchemaRegistry) -> ResourceCatalog:
    return ResourceCatalog(hub.fleet, registry, TelemetryResource(hub.telemetry, hub.fleet))


def read(catalog: ResourceCatalog, who: Principal, uri: str) -> Content | None:
    return asyncio.run(catalog.read(who, uri))


def uris(catalog: ResourceCatalog, who: Principal) -> list[str]:
    return [resource["uri"] for resource in catalog.listed(who)[0]]


def text(catalog: ResourceCatalog, uri: str, who: Principal | None = None) -> str:
    content = read(catalog, who or principal(), uri)
    assert content is not None
    return content.text


def test_a_manifest_is_the_signed_bytes_themselves(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog
) -> None:
    wire = hub.connect(node)
    content = read(catalog, principal(), MANIFEST)
    assert content is not None
    assert (content.mime_type, content.text.encode()) == (JSON, wire)


def test_an_identity_is_the_leaf_that_the_manifest_was_signed_with(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog
) -> None:
    hub.connect(node)
    content = read(catalog, principal(), IDENTITY)
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
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi", ("gateway", "site=north"))})
    assert json.loads(text(catalog, "fleet://nodes"))["nodes"] == [
        {
            "node_id": NODE_ID,
            "label": "greenhouse pi",
            "tags": ["gateway", "site=north"],
            "connected": True,
            "manifest_etag": etag_of(wire),
            "expires_at_ms": NOW_MS + TTL_MS,
            "finding": None,
            "expires_at": iso(NOW_MS + TTL_MS),
            "tools": [f"sys.{NODE_ID}.sysmetrics.snapshot", f"sysecho.{NODE_ID}.echo.invoke"],
        },
        {
            "node_id": OTHER_NODE_ID,
            "label": None,
            "tags": [],
            "connected": False,
            "manifest_etag": None,
            "expires_at_ms": None,
            "finding": None,
            "tools": [],
        },
    ]


def test_every_schema_can_be_read(catalog: ResourceCatalog, registry: SchemaRegistry) -> None:
    for ref, document in registry.documents.items():
        assert text(catalog, f"schema://{ref}").encode() == document


def test_a_node_without_a_manifest_has_nothing_to_read(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog
) -> None:
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert uris(catalog, principal()) == OF_THE_FLEET
    assert read(catalog, principal(), MANIFEST) is None
    assert read(catalog, principal(), IDENTITY) is None


@pytest.mark.parametrize(
    "scope", ["sessions:message", "tools:call:reversible", "tools:call:physical_actuation"]
)
def test_reading_needs_the_scope_that_reading_a_tool_needs(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog, scope: str
) -> None:
    hub.connect(node)
    who = principal(TENANT, scope)
    assert uris(catalog, who) == []
    for uri in (*OF_THE_FLEET, MANIFEST, IDENTITY, SCHEMA):
        assert read(catalog, who, uri) is None


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
    assert read(catalog, principal(), uri) is None


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("fleet://nodes?cursor=", "cursor must be the nextCursor of a page before"),
        ("fleet://nodes?cursor=x", "cursor must be the nextCursor of a page before"),
        (f"fleet://nodes?cursor={NODE_ID}&cursor={NODE_ID}", "the one parameter of this resource is cursor"),
        ("fleet://nodes?since_ms=1", "the one parameter of this resource is cursor"),
        ("fleet://nodes?cursor", "the one parameter of this resource is cursor"),
        ("fleet://changes?since_ms=-1", "since_ms must be a time in milliseconds since 1970, 0 or more"),
        ("fleet://changes?since_ms=1e3", "since_ms must be a time in milliseconds since 1970, 0 or more"),
        ("fleet://changes?since_ms=" + "9" * 5000, "since_ms must be a time in milliseconds since 1970"),
        ("fleet://changes?since_ms=", "since_ms must be a time in milliseconds since 1970"),
        (f"fleet://changes?cursor={NODE_ID}", "the one parameter of this resource is since_ms"),
    ],
)
def test_a_query_that_is_none_is_an_error_that_says_what_is_allowed(
    catalog: ResourceCatalog, uri: str, said: str
) -> None:
    with pytest.raises(ResourceQueryError, match=said):
        read(catalog, principal(), uri)


def test_a_page_beyond_the_last_node_is_empty(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog
) -> None:
    hub.connect(node)
    assert json.loads(text(catalog, f"fleet://nodes?cursor={NODE_ID}")) == {"nodes": []}


def test_new_tags_alone_are_no_new_name(hub: Hub, node: SimulatedNode, catalog: ResourceCatalog) -> None:
    hub.connect(node)
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "pi", ("gateway",))})
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "pi", ("site=north",))})
    hub.fleet.rename({NODE_ID: None})
    assert [what for _, what in changes(catalog)][-3:] == ["renamed", "tagged", "renamed"]


def test_each_template_names_what_can_be_read(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog
) -> None:
    hub.connect(node)
    fillings = {"node_id": NODE_ID, "kind": "system.metrics", "semver": "1.0.0"}
    for name, (template, mime_type, _description) in TEMPLATES.items():
        if name == "node-telemetry":
            continue  # there only is one while an agent follows the node
        uri = template.partition("{?")[0]
        content = read(catalog, principal(), uri.format_map(fillings))
        assert content is not None
        assert content.mime_type == mime_type


# --- nodes that people name ---------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["greenhouse%20pi", "Greenhouse Pi", NODE_ID.upper(), NODE_ID[:-1]])
def test_a_nodes_resources_are_read_by_its_label_or_the_beginning_of_its_id(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog, reference: str
) -> None:
    hub.connect(node)
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi")})
    assert text(catalog, f"node://{reference}/identity") == node.leaf_pem


@pytest.mark.parametrize("reference", ["", OTHER_NODE_ID, "greenhose%20pi", "%ff%00", "..%2f..", "x" * 5000])
def test_what_names_no_node_is_an_error_with_close_names(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog, reference: str
) -> None:
    hub.connect(node)
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi")})
    with pytest.raises(UnknownNodeError) as raised:
        read(catalog, principal(), f"node://{reference}/manifest")
    assert raised.value.close == (("greenhouse pi",) if "gree" in reference else ())


def test_a_label_is_in_the_titles_of_its_nodes_resources(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog
) -> None:
    hub.connect(node)
    assert [resource.get("title") for resource in catalog.listed(principal())[0]] == [None] * 4
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi")})
    titles = [resource.get("title") for resource in catalog.listed(principal())[0]]
    assert titles == [None, None, "greenhouse pi: manifest", "greenhouse pi: identity"]


# --- pages --------------------------------------------------------------------------------------------


def many(hub: Hub, count: int) -> list[str]:
    """Have ``count`` nodes connected; return their ids, sorted."""
    nodes = [hub.ca.issue(f"01hzx9k3m4p7q8r9s0t1v2{number:04}") for number in range(count)]
    for node in nodes:
        hub.connect(node)
    return [node.node_id for node in nodes]


def pages_of_nodes(catalog: ResourceCatalog) -> list[list[str]]:
    """Return the ids on each page of ``fleet://nodes``."""
    pages, uri = list[list[str]](), "fleet://nodes"
    while True:
        page = json.loads(text(catalog, uri))
        pages.append([node["node_id"] for node in page["nodes"]])
        if "nextCursor" not in page:
            return pages
        uri = f"fleet://nodes?cursor={page['nextCursor']}"


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_nodes_are_listed_page_by_page_and_each_once(
    hub: Hub, catalog: ResourceCatalog, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    ids = many(hub, count)
    monkeypatch.setattr("relay.mcp_api.resources.NODES_PER_PAGE", 3)
    pages = pages_of_nodes(catalog)
    assert [node_id for page in pages for node_id in page] == ids
    assert [len(page) for page in pages[:-1]] == [3] * (len(pages) - 1)
    assert 1 <= len(pages[-1]) <= 3


def test_a_page_of_nodes_with_many_tools_ends_before_clients_reject_it(
    hub: Hub, catalog: ResourceCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An eighth of the limit, and so of what clients take: to sign and to list fewer takes less time.
    monkeypatch.setattr("relay.mcp_api.resources.MAX_PAGE_BYTES", MAX_PAGE_BYTES // 8)
    tools = [{**ECHO, "cap_id": f"echo{number:012}"} for number in range(64)]
    for number in range(23):
        hub.connect(hub.ca.issue(f"01hzx9k3m4p7q8r9s0t1v2{number:04}"), capabilities=tools)
    pages = pages_of_nodes(catalog)
    assert sum(map(len, pages)) == 23
    assert len(pages) > 1
    assert len(json.dumps(text(catalog, "fleet://nodes"))) < (1 << 20) // 8


def test_resources_are_listed_page_by_page_and_each_once(
    hub: Hub, catalog: ResourceCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = many(hub, 7)
    monkeypatch.setattr("relay.mcp_api.resources.NODES_PER_PAGE", 3)
    page, cursor = catalog.listed(principal())
    found = [resource["uri"] for resource in page]
    while cursor is not None:
        page, cursor = catalog.listed(principal(), cursor)
        found += [resource["uri"] for resource in page]
    assert found == [*OF_THE_FLEET, *(f"node://{i}/{part}" for i in ids for part in ("manifest", "identity"))]


@pytest.mark.parametrize("cursor", ["", "x", 7, {}, NODE_ID.upper()])
def test_a_cursor_that_was_not_given_is_an_error(catalog: ResourceCatalog, cursor: object) -> None:
    with pytest.raises(CursorError):
        catalog.listed(principal(), cursor)


def test_a_retired_node_is_not_listed(hub: Hub, catalog: ResourceCatalog) -> None:
    first, second = many(hub, 2)
    hub.fleet.retire(frozenset({first}), ())
    assert pages_of_nodes(catalog) == [[second]]
    assert uris(catalog, principal()) == [
        *OF_THE_FLEET,
        f"node://{second}/manifest",
        f"node://{second}/identity",
    ]


# --- changes ------------------------------------------------------------------------------------------


def changes(
    catalog: ResourceCatalog, since_ms: int = 0, who: Principal | None = None
) -> list[tuple[int, str]]:
    document = json.loads(text(catalog, f"fleet://changes?since_ms={since_ms}", who))
    assert [change["at"] for change in document["changes"]] == [
        iso(change["at_ms"]) for change in document["changes"]
    ]
    return [(change["at_ms"], change["what"]) for change in document["changes"]]


def test_what_came_changed_was_renamed_and_went_is_listed_since_a_time(
    hub: Hub, node: SimulatedNode, catalog: ResourceCatalog
) -> None:
    hub.clock.advance(GRACE_MS)
    hub.connect(node)
    at_ms = [hub.clock()]
    at_ms.append(hub.clock.advance(1))
    hub.announce(node, issued_at_ms=at_ms[-1], capabilities=[ECHO])
    at_ms.append(hub.clock.advance(1))
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi")})
    hub.fleet.connection_changed(NODE_ID, Where.NOWHERE)
    at_ms.append(hub.clock.advance(GRACE_MS))
    hub.fleet.sweep()
    assert changes(catalog) == list(zip(at_ms, ("came", "changed", "renamed", "went"), strict=True))
    assert changes(catalog, at_ms[2]) == [(at_ms[2], "renamed"), (at_ms[3], "went")]
    assert changes(catalog, at_ms[3] + 1) == []
    assert changes(catalog, 0, principal("globex")) == []
    document = json.loads(text(catalog, "fleet://changes"))
    assert {change["node_id"] for change in document["changes"]} == {NODE_ID}
    assert {change["label"] for change in document["changes"]} == {"greenhouse pi"}
    assert document["complete_since_ms"] == NOW_MS


def test_a_renewal_is_no_change(hub: Hub, node: SimulatedNode, catalog: ResourceCatalog) -> None:
    hub.connect(node)
    before = changes(catalog)
    hub.announce(node, issued_at_ms=hub.clock.advance(60_000))
    hub.fleet.inventory.heartbeat(NODE_ID, "00" * 32)
    assert changes(catalog) == before


def test_a_node_that_moves_goes_from_one_tenant_and_comes_to_the_other_without_its_new_label(
    hub: Hub, catalog: ResourceCatalog
) -> None:
    key = key_named("a node that moved")
    hub.connect(hub.ca.issue(NODE_ID, TENANT, key=key, now_ms=NOW_MS - DAY_MS))
    moved = hub.ca.issue(NODE_ID, "globex", key=key)
    hub.announce(moved, issued_at_ms=hub.clock.advance(1))
    hub.fleet.rename({NODE_ID: NodeName("globex", "secret plan")})
    assert [what for _, what in changes(catalog)] == ["came", "went"]
    assert [what for _, what in changes(catalog, 0, principal("globex"))] == ["came", "renamed"]
    assert "secret" not in text(catalog, "fleet://changes")
    assert "secret" in text(catalog, "fleet://changes", principal("globex"))
