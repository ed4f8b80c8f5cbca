from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from hashlib import sha256

import httpx2
import pytest
import pytest_asyncio

from relay.auth.permissions import SCOPES
from relay.http.routes import make_routes
from schemas.addresses import MCP_PATHS, HostPort
from schemas.canonical import blake3_hex
from schemas.health import Health
from schemas.registry import SchemaRegistry
from tests.fakes import raw_http
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.hub import Hub
from tests.fakes.serving import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

REF = "system.echo.invoke.input@1.0.0"


class Site:
    """The routes, and how ready the parts say they are."""

    def __init__(self, hub: Hub, issuers: Sequence[str] = ()) -> None:
        self.parts = {"broker": True, "audit": True}
        self.health: dict[str, Health] = {}
        self.routes = make_routes(
            public_url=PUBLIC_URL,
            registry=hub.registry,
            metrics=hub.metrics,
            health=lambda: {
                **{name: Health.passive(ready=good) for name, good in self.parts.items()},
                **self.health,
            },
            running=nullcontext,
            issuers=issuers,
        )
        self.http = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(self.routes), base_url=PUBLIC_URL, trust_env=False
        )

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        return await self.http.get(path, headers=headers)


@pytest_asyncio.fixture(loop_scope="module")
async def site(hub: Hub) -> AsyncIterator[Site]:
    site = Site(hub)
    async with site.http:
        yield site


@pytest.fixture
def address(site: Site, server: Server) -> HostPort:
    """Where the routes are served over a real socket."""
    server.app = site.routes
    return server.address


async def exchange(address: HostPort, request_line: str) -> tuple[int, bytes]:
    """Send a request as it stands: a client would tidy its path away. Return the status and all that came."""
    request = f"{request_line} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    answer = await raw_http.exchange(address.port, request.encode())
    return int(answer.split(b" ")[1]), answer


async def test_every_schema_is_listed_and_served_as_its_canonical_bytes(
    site: Site, registry: SchemaRegistry
) -> None:
    listed = (await site.get("/schemas/")).json()["schemas"]
    assert listed == sorted(registry.documents)
    for ref in listed:
        response = await site.get(f"/schemas/{ref}")
        assert response.status_code == 200
        assert response.content == registry.documents[ref]
        assert response.headers["content-type"] == "application/schema+json"


async def test_a_schema_may_be_cached_permanently(site: Site, registry: SchemaRegistry) -> None:
    response = await site.get(f"/schemas/{REF}")
    assert response.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert response.headers["etag"] == f'"{blake3_hex(registry.documents[REF])}"'


async def test_who_has_it_already_is_told_so_without_the_bytes(site: Site) -> None:
    first = await site.get(f"/schemas/{REF}")
    again = await site.get(f"/schemas/{REF}", **{"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert again.headers["cache-control"] == first.headers["cache-control"]
    other = await site.get(f"/schemas/{REF}", **{"If-None-Match": '"another"'})
    assert other.status_code == 200


async def test_a_schema_can_be_asked_about_without_being_fetched(address: HostPort) -> None:
    status, answer = await exchange(address, f"HEAD /schemas/{REF}")
    assert status == 200
    assert answer.endswith(b"\r\n\r\n")


PATHS = [
    "/schemas/nothing@1.0.0",
    "/schemas/system.echo.invoke.input",
    f"/schemas/{REF}.json",
    f"/schemas/./{REF}",
    f"/schemas/../schemas/{REF}",
    f"/schemas//{REF}",
    "/schemas/..",
    "/schemas/../pyproject.toml",
    "/schemas/%2e%2e",
    "/schemas/%2e%2e/%2e%2e/etc/passwd",
    "/schemas/%2e%2e%2fregistry.py",
    "/schemas/..%2f..%2frelay%2fhttp.py",
    "/schemas/%252e%252e%252fregistry.py",
    "/schemas/..\\registry.py",
    "/schemas/%00",
    f"/schemas/{REF}%00",
    "/schemas//etc/passwd",
    f"/schemas/{REF.upper()}",
]


async def test_a_name_that_is_none_of_ours_is_not_found_and_never_a_path(address: HostPort) -> None:
    answers = {path: await exchange(address, f"GET {path}") for path in PATHS}
    assert {path: status for path, (status, _) in answers.items() if status != 404} == {}
    assert all(len(answer) < 500 for _, answer in answers.values())
    assert (await exchange(address, f"GET /schemas/{REF}"))[0] == 200


async def test_a_schema_cannot_be_changed(site: Site) -> None:
    for method in ("PUT", "POST", "DELETE"):
        response = await site.http.request(method, f"/schemas/{REF}", content=b"{}")
        assert response.status_code == 405


async def test_health_is_that_the_process_answers(site: Site) -> None:
    site.parts.update(broker=False, audit=False)
    response = await site.get("/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("down", "status"),
    [
        pytest.param([], 200, id="all are there"),
        pytest.param(["broker"], 503, id="no broker"),
        pytest.param(["audit"], 503, id="no audit"),
        pytest.param(["broker", "audit"], 503, id="neither"),
    ],
)
async def test_readiness_is_that_every_part_is_there_and_says_which_is_not(
    site: Site, down: list[str], status: int
) -> None:
    site.parts.update(dict.fromkeys(down, False))
    response = await site.get("/readyz")
    assert response.status_code == status
    assert response.json()["ready"] is not bool(down)
    shown = response.json()["subsystems"]
    assert {name: health["ready"] for name, health in shown.items()} == site.parts


async def test_a_relay_with_a_loop_that_has_stalled_is_neither_healthy_nor_ready(hub: Hub) -> None:
    site = Site(hub)
    site.health["broker"] = Health(started=True, live=False, ready=True)
    async with site.http:
        healthy, ready = await site.get("/healthz"), await site.get("/readyz")
    assert (healthy.status_code, healthy.json()) == (503, {"status": "stalled", "stalled": ["broker"]})
    assert ready.status_code == 503


async def test_metrics_are_what_the_meters_say(site: Site, hub: Hub) -> None:
    hub.metrics.calls("ok", "").inc()
    response = await site.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'edge_relay_calls_total{code="ok",hop=""} 1.0' in response.text


METADATA = "/.well-known/oauth-protected-resource"
METADATA_PATHS = [METADATA, *(f"{METADATA}{path}" for path in MCP_PATHS)]


@pytest.mark.parametrize("path", METADATA_PATHS)
async def test_the_metadata_names_the_resource_and_where_to_get_a_token_for_it(hub: Hub, path: str) -> None:
    resource = path.removeprefix(METADATA) or "/mcp"  # RFC 9728 section 3.3: clients compare them
    site = Site(hub, ["https://issuer.example"])
    async with site.http:
        response = await site.get(path)
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "resource": f"{PUBLIC_URL}{resource}",
        "resource_name": "Edge relay",
        "scopes_supported": list(SCOPES),
        "bearer_methods_supported": ["header"],
        "authorization_servers": ["https://issuer.example"],
    }


@pytest.mark.parametrize("path", METADATA_PATHS)
async def test_without_an_authorization_server_there_is_no_metadata(hub: Hub, path: str) -> None:
    site = Site(hub, [])
    async with site.http:
        assert (await site.get(path)).status_code == 404


async def test_the_nodes_path_is_for_websockets_only(site: Site) -> None:
    assert (await site.get("/devices/connect")).status_code == 404


@pytest.mark.parametrize("path", ["/devices", "/docs", "/openapi.json", "/mcp"])
async def test_there_is_nothing_else(site: Site, path: str) -> None:
    assert (await site.get(path)).status_code == 404


SIGN_IN = [
    ("GET", "/.well-known/oauth-protected-resource"),
    ("GET", "/.well-known/oauth-authorization-server/mcp/kinds"),
    ("GET", "/.well-known/openid-configuration"),
    ("GET", "/authorize"),
    ("POST", "/register"),
    ("POST", "/token"),
]


@pytest.mark.parametrize(("method", "path"), SIGN_IN)
async def test_a_client_that_looks_for_a_sign_in_gets_the_reason_as_an_error_of_oauth(
    site: Site, method: str, path: str
) -> None:
    answer = await site.http.request(method, path, headers={"accept": "*/*"})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/json")
    assert answer.json()["error"] == "no_sign_in"
    assert "relay token issue --sub NAME" in answer.json()["error_description"]


async def test_with_an_authorization_server_the_reason_names_it(hub: Hub) -> None:
    site = Site(hub, ["https://issuer.example"])
    async with site.http:
        answer = await site.http.post("/register")
    assert "https://issuer.example" in answer.json()["error_description"]


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize(("path", "status"), [("/", 200), ("/authorize", 404), ("/anything", 404)])
async def test_a_browser_gets_a_page_that_says_how_to_connect_and_loads_and_runs_nothing(
    site: Site, path: str, status: int
) -> None:
    page = await site.get(path, accept=BROWSER)
    assert (page.status_code, page.headers["content-type"]) == (status, "text/html; charset=utf-8")
    assert f"<code>{PUBLIC_URL}/mcp/kinds</code>" in page.text
    assert f"relay connect claude-code --url {PUBLIC_URL} " in page.text
    policy = page.headers["content-security-policy"]
    style = page.text.split("<style>")[1].split("</style>")[0]
    digest = b64encode(sha256(style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; ")
    assert "<script" not in page.text
    assert " style=" not in page.text
    assert "src=" not in page.text


@pytest.mark.parametrize("path", ["/?<b>", "/%3Cb%3E", "/.well-known/%3Cb%3E"])
@pytest.mark.parametrize("accept", [BROWSER, "*/*"])
async def test_nothing_of_a_request_is_in_what_it_gets(site: Site, path: str, accept: str) -> None:
    answer = await site.get(path, accept=accept, referer="<b>", **{"user-agent": "<b>"})
    assert "<b>" not in answer.text


async def test_a_program_gets_json_at_the_root_and_for_a_method_that_is_not_served(site: Site) -> None:
    assert (await site.get("/")).json()["mcp"] == f"{PUBLIC_URL}/mcp/kinds"
    refused = await site.http.post("/schemas/")
    assert (refused.status_code, refused.json()["error"]) == (405, "method")
    assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD"}


async def test_the_relay_does_not_say_what_it_runs_on(address: HostPort) -> None:
    _, answer = await exchange(address, "GET /healthz")
    assert b"\nserver:" not in answer.lower()
    assert b"uvicorn" not in answer.lower()
