"""The configurations for proxies that docs/sign-in.md names, with the proxies themselves, over TLS.

Caddy has a certificate of its own authority here, and nginx one of a root of the test.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from relay.cli.sign_in_doctor import CHECKS, SignInChecks
from relay.pki.roots import server_key_to_pem
from relay.sign_in.authorization import challenge_of
from schemas.process.doctor import Finding, Severity, made
from schemas.tls import client_context
from tests.fakes.person import Browser, answered
from tests.fakes.polling import until
from tests.fakes.ports import unused_port
from tests.fakes.proxied import installed, running_proxy
from tests.fakes.server_ca import SimulatedServerCa, server_key_named
from tests.fakes.small_fleet import SmallFleet, small_fleet

pytestmark = pytest.mark.long

DOCS = Path(__file__).parents[3] / "docs" / "proxies"
BOUND_S, CLIENT, VERIFIER = 30, "127.0.0.2", "v" * 43
HEADERS = {"accept": "application/json, text/event-stream", "mcp-protocol-version": "2025-11-25"}


@dataclass
class Proxied:
    """A relay behind a proxy at ``url``, whose certificate is of the root in the file ``root``."""

    fleet: SmallFleet
    url: str
    root: Path


def as_documented(name: str, *changes: tuple[str, str]) -> str:
    """Return a configuration of the documentation, but for names and places."""
    text = (DOCS / name).read_text("utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def caddy(directory: Path, port: int, relay: int) -> tuple[list[str], Path]:
    options = ("admin off", "skip_install_trust", "auto_https disable_redirects")
    usual = "\n\t".join(("{", *options, f"storage file_system {directory}")) + "\n}\n"
    text = as_documented(
        "Caddyfile",
        ("\nrelay.example {\n", f"\nhttps://localhost:{port} {{\n\tbind 127.0.0.1\n\ttls internal\n"),
        ("127.0.0.1:8700 {", f"127.0.0.1:{relay} {{"),
    )
    (directory / "Caddyfile").write_text(usual + text)
    command = [installed("caddy"), "run", "--config", str(directory / "Caddyfile"), "--adapter", "caddyfile"]
    return command, directory / "pki" / "authorities" / "local" / "root.crt"


def nginx(directory: Path, port: int, relay: int) -> tuple[list[str], Path]:
    servers = SimulatedServerCa("root of servers", time.time_ns() // 1_000_000)
    key = server_key_named("nginx")
    (directory / "cert.pem").write_text(servers.issue("nginx", ["localhost"], key.public_key()))
    (directory / "key.pem").write_text(server_key_to_pem(key))
    (directory / "root.pem").write_text(servers.root_pem)
    text = as_documented(
        "nginx.conf",
        ("server 127.0.0.1:8700;", f"server 127.0.0.1:{relay};"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("server_name relay.example;", "server_name localhost;"),
        ("/etc/nginx/relay.example.pem", str(directory / "cert.pem")),
        ("/etc/nginx/relay.example.key", str(directory / "key.pem")),
    )
    temporary = "".join(
        f"{kind}_temp_path {directory}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (directory / "nginx.conf").write_text(
        f"daemon off;\nmaster_process off;\npid {directory}/pid;\nerror_log {directory}/errors;\n"
        f"events {{ worker_connections 256; }}\nhttp {{\naccess_log off;\n{temporary}{text}}}\n"
    )
    paths = ("-p", str(directory), "-e", str(directory / "errors"), "-c", str(directory / "nginx.conf"))
    return [installed("nginx"), *paths], directory / "root.pem"


@pytest.fixture(params=[caddy, nginx])
async def proxied(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Proxied]:
    begin: Callable[[Path, int, int], tuple[list[str], Path]] = request.param
    port, directory = unused_port(), tmp_path / "proxy"
    directory.mkdir()
    url = f"https://localhost:{port}"
    async with small_fleet(tmp_path, host="localhost") as fleet:
        command, root = begin(directory, port, fleet.port)
        async with running_proxy(command, port):
            await until(root.exists)  # Caddy makes its authority when it starts
            await fleet.relay("people", "invite", "grace", "--public-url", url)
            options = ("--no-broker", "--public-url", url, "--trusted-proxies", "127.0.0.1")
            await fleet.start_relay(*options)
            monkeypatch.setenv("SSL_CERT_FILE", str(root))  # what this machine trusts, for the doctor
            yield Proxied(fleet, url, root)


@asynccontextmanager
async def client_of(proxied: Proxied) -> AsyncIterator[httpx2.AsyncClient]:
    """Hold a client of another address than the proxy's."""
    tls = client_context(proxied.root.read_text("ascii"))
    transport = httpx2.AsyncHTTPTransport(verify=tls, local_address=CLIENT, trust_env=False)
    async with httpx2.AsyncClient(transport=transport, base_url=proxied.url, timeout=BOUND_S) as http:
        yield http


def looked(checks: SignInChecks) -> dict[str, Finding]:
    return {row.name: made(row, checks) for row in CHECKS}


async def test_sign_in_passes_a_proxy_as_documented(proxied: Proxied) -> None:
    found = await asyncio.to_thread(looked, SignInChecks(proxied.url))
    assert {name for name, each in found.items() if each.severity is not Severity.OK} == {"address"}, found
    link = (await proxied.fleet.relay("people", "invite", "ada", "--role", "operator")).strip()
    assert link.startswith(proxied.url)
    async with client_of(proxied) as http:
        ada = Browser(http, proxied.url)
        assert (await ada.accept_invitation(link)).status_code == 200
        redirect, resource = "http://127.0.0.1:41234/callback", f"{proxied.url}/mcp/kinds"
        body = {"client_name": "A client", "redirect_uris": [redirect]}
        client = {"client_id": (await http.post("/register", json=body)).json()["client_id"]}
        common = client | {"redirect_uri": redirect, "resource": resource}
        query = httpx2.QueryParams(
            common
            | {"response_type": "code", "state": "s", "code_challenge": challenge_of(VERIFIER)}
            | {"code_challenge_method": "S256"}
        )
        code = answered(await ada.allow(f"/authorize?{query}"))["code"]
        form = common | {"grant_type": "authorization_code", "code": code, "code_verifier": VERIFIER}
        token = (await http.post("/token", data=form)).json()["access_token"]
        headers = HEADERS | {"authorization": f"Bearer {token}"}
        hello = {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "c", "version": "1"},
        }
        answer = await http.post("/mcp/kinds", json=message(1, "initialize", hello), headers=headers)
        headers["mcp-session-id"] = answer.headers["mcp-session-id"]
        # Another id: of the first the end of its stream may come later than its answer.
        call = message(2, "tools/call", {"name": "find_nodes", "arguments": {}})
        answer = await http.post("/mcp/kinds", json=call, headers=headers)
        assert re.search(r'"total": ?0', answer.text)
    lines = proxied.fleet.state.audit.read_text("ascii").splitlines()
    (signed_in,) = [line for line in map(json.loads, lines) if line.get("event") == "signed_in"]
    assert signed_in["source"] == CLIENT


def message(request_id: int, method: str, params: Mapping[str, object]) -> dict[str, object]:
    return {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
