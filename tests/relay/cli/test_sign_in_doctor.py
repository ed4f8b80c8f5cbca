"""``relay doctor --sign-in``: a relay behind a proxy, in which each fault is planted, one at a time."""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from relay.cli.sign_in_doctor import CHECKS, SignInChecks
from relay.client.http import MOST_ANSWER_BYTES
from schemas.process.doctor import Finding, Severity, made
from tests.fakes.small_fleet import small_fleet

pytestmark = pytest.mark.integration

Change = Callable[[str, httpx2.Response], tuple[int, dict[str, str], bytes] | None]
_DROPPED = {"transfer-encoding", "connection", "content-length"}


@dataclass
class Proxy:
    """A proxy in front of the relay. ``change`` answers in place of it; ``headers`` are sent instead."""

    port_behind: int = 0
    change: Change = lambda _path, _answer: None
    headers: dict[str, str] = field(default_factory=dict)
    swallowed: str = ""

    def serve(self) -> ThreadingHTTPServer:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                sent = {name.lower(): value for name, value in self.headers.items()} | proxy.headers
                url = f"http://127.0.0.1:{proxy.port_behind}{self.path}"
                with httpx2.Client(trust_env=False) as http:
                    answer = http.request(self.command, url, content=body, headers=sent)
                changed = proxy.change(self.path, answer)
                if proxy.swallowed and self.path.startswith(proxy.swallowed):
                    changed = (404, {"content-type": "text/html"}, b"<h1>Not here</h1>")
                kept = {name: value for name, value in answer.headers.items() if name not in _DROPPED}
                status, headers, content = changed or (answer.status_code, kept, answer.content)
                self.send_response_only(status)
                for name, value in {**headers, "content-length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET  # noqa: N815 - as above

            def log_message(self, *_: object) -> None: ...

        return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def looked(checks: SignInChecks, *names: str) -> dict[str, Finding]:
    return {row.name: made(row, checks) for row in CHECKS if row.name in names or not names}


@dataclass
class Site:
    proxy: Proxy
    url: str

    async def found(self, **parts: Any) -> dict[str, Finding]:
        """Return what each check finds."""
        return await asyncio.to_thread(looked, SignInChecks(self.url, **parts))


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    proxy = Proxy()
    server = proxy.serve()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://localhost:{server.server_address[1]}"
    try:
        async with small_fleet(tmp_path, host="localhost") as fleet:
            proxy.port_behind = fleet.port
            await fleet.relay("people", "invite", "ada", "--public-url", url)
            await fleet.start_relay("--no-broker", "--public-url", url)
            yield Site(proxy, url)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def with_json(path: str, **members: object) -> Change:
    """Return what changes members of the JSON at ``path``; None removes one."""

    def change(asked: str, answer: httpx2.Response) -> tuple[int, dict[str, str], bytes] | None:
        if not asked.startswith(path):
            return None
        value = {name: each for name, each in (answer.json() | members).items() if each is not None}
        return 200, {"content-type": "application/json"}, json.dumps(value).encode()

    return change


def redirecting(path: str) -> Change:
    headers = {"location": "https://elsewhere.example/"}
    return lambda asked, _answer: (301, headers, b"") if asked.startswith(path) else None


_SERVER = "/.well-known/oauth-authorization-server"


async def test_each_fault_of_a_proxy_is_named(site: Site) -> None:
    well = await site.found()
    assert {name for name, finding in well.items() if finding.severity is Severity.FAILURE} == set(), well
    assert "hosted clients need a public name" in well["address"].fix

    async def fails(check: str, words: str, **parts: Any) -> None:
        finding = (await site.found(**parts))[check]
        assert finding.severity in {Severity.FAILURE, Severity.WARNING}, finding
        assert words in finding.found + finding.fix, finding
        site.proxy.change, site.proxy.headers, site.proxy.swallowed = (lambda _p, _a: None), {}, ""

    site.proxy.headers = {"host": "127.0.0.2"}
    await fails("host", "a proxy rewrites Host")
    site.proxy.change = with_json(_SERVER, issuer="http://hub.example")
    await fails("metadata", "the issuer is http://hub.example")
    site.proxy.change = with_json(_SERVER, code_challenge_methods_supported=None)
    await fails("metadata", "has no S256")
    site.proxy.change = with_json(_SERVER, code_challenge_methods_supported=1)
    await fails("metadata", "has no S256")
    site.proxy.change = with_json("/.well-known/openid-configuration", issuer="https://another.example")
    await fails("metadata", "is of another authorization server")
    site.proxy.swallowed = "/.well-known/"
    await fails("metadata", "without JSON")
    site.proxy.change = redirecting("/.well-known/oauth-protected-resource")
    await fails("resource", "redirects to https://elsewhere.example/")
    site.proxy.change = with_json("/.well-known/oauth-protected-resource", resource=site.url)
    await fails("resource", "are for")
    site.proxy.change = with_json("/.well-known/oauth-protected-resource", authorization_servers=1)
    await fails("resource", "another authorization server")
    site.proxy.change = with_json(_SERVER, issuer="h" * (MOST_ANSWER_BYTES + 1))
    await fails("metadata", "without JSON")
    site.proxy.swallowed = "/mcp"
    await fails("challenge", "without a challenge")
    site.proxy.swallowed = "/register"
    await fails("registration", "without JSON")
    site.proxy.change = with_json("/register", client_secret=None, client_id=None)
    await fails("registration", "no client_id")
    site.proxy.swallowed = "/authorize"
    await fails("authorization", "/authorize answers 404")
    site.proxy.swallowed = "/token"
    await fails("token", "without JSON")
    site.proxy.change = lambda path, _answer: (503, {}, b"{}") if path == "/token" else None
    await fails("token", "`relay status` there says what is away")
    await fails("clock", "behind this machine's", now_s=lambda: 4_000_000_000.0)


async def test_where_people_sign_in_at_a_provider_alone_nothing_is_wrong(tmp_path: Path) -> None:
    secret, settings = tmp_path / "secret", tmp_path / "relay.toml"
    secret.touch(0o600)
    allow = 'allow = ["groups=operators:operator:*"]'
    provider = f'issuer = "https://id.example"\nclient_id = "hub"\nsecret_file = "{secret}"\n{allow}\n'
    settings.write_text(f'["people.oidc"]\n{provider}')
    async with small_fleet(tmp_path, host="localhost") as fleet:
        url = f"http://localhost:{fleet.port}"
        await fleet.start_relay("--no-broker", "--public-url", url, "--config", str(settings))
        found = await asyncio.to_thread(looked, SignInChecks(url), "authorization")
    assert found["authorization"] == Finding.good("the page opens")


@pytest.mark.parametrize(
    ("url", "addresses", "check", "words"),
    [
        ("https://hub.example", ["192.168.1.5"], "address", "private address 192.168.1.5"),
        ("https://hub.example", ["2606:4700::1111"], "address", "IPv6 addresses alone"),
        ("https://hub.example", None, "address", "has no address"),
        ("http://hub.example", ["93.184.215.14"], "certificate", "is not https"),
    ],
)
def test_what_the_name_alone_tells(url: str, addresses: list[str] | None, check: str, words: str) -> None:
    def resolve(_host: str) -> list[str]:
        if addresses is None:
            raise OSError(os.strerror(2))
        return addresses

    checks = SignInChecks(url, resolve)
    (row,) = [row for row in CHECKS if row.name == check]
    finding = made(row, checks)
    assert finding.severity in {Severity.FAILURE, Severity.WARNING}
    assert words in finding.found + finding.fix


async def test_a_certificate_that_others_do_not_trust_is_named(tmp_path: Path) -> None:
    async with small_fleet(tmp_path, secure=True, host="localhost") as fleet:
        await fleet.start_relay(*fleet.listening)
        found = (await asyncio.to_thread(looked, SignInChecks(fleet.url), "certificate"))["certificate"]
        assert found.severity is Severity.FAILURE
        assert "Sign-in needs a public certificate" in found.found
