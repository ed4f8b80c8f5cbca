import asyncio
import hashlib
import io
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from relay.http.listener import bind
from relay.observability.metrics import Metrics
from relay.pki.authority import CertificateAuthority
from relay.pki.errors import AuthorityError
from relay.server.serving import run_relay
from relay.sessions.handshake import Handshake
from relay.settings.config import ExternalIssuerConfig, RelayConfig, StateFiles
from relay.settings.environment import now_ms
from relay.state.watcher import Watcher
from schemas.addresses import CONNECT_PATH, BrokerAddress, HostPort
from schemas.faults import FailedError
from schemas.files import PRIVATE, write_atomic
from schemas.frames import SUBPROTOCOL
from schemas.tls import client_context
from tests.fakes.issuer import ISSUER, IssuerServer, outside_token
from tests.fakes.lines import LogLines
from tests.fakes.metrics_client import metrics_client
from tests.fakes.ports import unused_port

pytestmark = pytest.mark.integration

BOUND_S = 30
UNNAMED_PROXY = (
    "all that a proxy of this machine forwards is limited as one address since 0.3: "
    "name the proxy in trusted_proxies"
)
OLD_METRICS = "/metrics is on the public listener, and will not be in 0.4: set metrics_listen"


def config(state: Path, listen: HostPort, broker: BrokerAddress) -> RelayConfig:
    return RelayConfig(broker, f"http://{listen}", listen, StateFiles(state))


@dataclass
class Running:
    """A relay that runs, and clients for its HTTP and its metrics."""

    http: httpx2.AsyncClient
    metrics: httpx2.AsyncClient
    address: HostPort
    lines: LogLines

    async def faults(self, source: str) -> float:
        """Return how many faults of ``source`` the metrics tell of."""
        text = (await self.metrics.get("/metrics")).text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        samples = families["edge_relay_faults"].samples
        return sum(
            sample.value
            for sample in samples
            if sample.name == "edge_relay_faults_total" and sample.labels["source"] == source
        )


@asynccontextmanager
async def running_relay(state: Path, port: int = 0, **changed: Any) -> AsyncIterator[Running]:
    CertificateAuthority(state / "ca", now_ms, os.urandom).create()
    lines = LogLines()
    with bind(HostPort("127.0.0.1", port)) as listener:
        listener.listen()
        address = HostPort(*listener.getsockname())
        usual = replace(
            config(state, address, BrokerAddress("127.0.0.1", 1)), metrics_listen=state / "metrics.sock"
        )
        wanted = replace(usual, **changed)
        task = asyncio.create_task(run_relay(wanted, listener, lines))
        async with (
            asyncio.timeout(BOUND_S),
            httpx2.AsyncClient(base_url=f"http://{address}", trust_env=False) as http,
            metrics_client(state / "metrics.sock") as metrics,
        ):
            await lines.until("relay started")
            yield Running(http, metrics, address, lines)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def test_the_time_is_the_systems_in_milliseconds() -> None:
    before = time.time_ns() // 1_000_000
    assert before <= now_ms() <= time.time_ns() // 1_000_000


async def test_a_relay_without_a_ca_does_not_start(tmp_path: Path) -> None:
    with bind(HostPort("127.0.0.1", 0)) as listener:
        address = HostPort(*listener.getsockname())
        wanted = config(tmp_path, address, BrokerAddress("127.0.0.1", 1))
        with pytest.raises(AuthorityError, match="relay ca init"):
            await run_relay(wanted, listener, io.StringIO())


async def test_the_parts_together_are_ready_when_the_broker_is_there_and_stop_when_told(
    tmp_path: Path, broker: BrokerAddress
) -> None:
    async with running_relay(tmp_path, broker=broker) as relay:
        await relay.lines.until("broker connected")
        ready = await relay.http.get("/readyz")
        foreign = await relay.http.get("/healthz", headers={"Host": "evil.example"})
        refused = await relay.http.post("/mcp")
    assert ready.status_code == 200
    assert all(health["ready"] for health in ready.json()["subsystems"].values())
    assert foreign.status_code == 421
    assert refused.status_code == 401
    assert "relay token issue" in refused.json()["suggested_fix"]
    (started,), (ended,) = (relay.lines.entries(f"relay {event}") for event in ("started", "ended"))
    assert started["url"] == f"http://{relay.address}"
    # The anchors outside the audit: what it ended with, then and now.
    assert started["audit_head"] == "0" * 64
    *_, newest = (tmp_path / "audit.jsonl").read_bytes().splitlines()
    assert ended["audit_head"] == hashlib.sha256(newest).hexdigest()


@pytest.mark.long
async def test_a_relay_that_cannot_read_what_was_revoked_is_not_ready_until_it_can(
    tmp_path: Path, broker: BrokerAddress
) -> None:
    revoked = tmp_path / "revoked_tokens.jsonl"

    async def until_revocations(http: httpx2.AsyncClient, *, known: bool) -> int:
        while True:
            answer = await http.get("/readyz")
            if answer.json()["subsystems"]["revocations"]["ready"] is known:
                return answer.status_code
            await asyncio.sleep(0.05)

    async with running_relay(tmp_path, broker=broker) as relay:
        await relay.lines.until("broker connected")
        write_atomic(revoked, "damaged\n", PRIVATE)
        damaged = await until_revocations(relay.http, known=False)
        write_atomic(revoked, "", PRIVATE)
        mended = await until_revocations(relay.http, known=True)
    assert (damaged, mended) == (503, 200)
    (unread,) = relay.lines.entries("a change cannot be read")
    assert (unread["what"], unread["reason"]) == ("tokens", f"{revoked} is damaged: line 1 is no entry")


async def test_a_relay_that_was_told_of_an_outside_issuer_takes_its_tokens_and_names_it(
    tmp_path: Path,
) -> None:
    async with (
        IssuerServer.running() as server,
        running_relay(tmp_path, external_issuer=ExternalIssuerConfig(ISSUER, server.url)) as relay,
    ):
        fetched = await relay.lines.until("outside issuer's keys fetched")
        now_s = now_ms() // 1000
        times: dict[str, Any] = {"iat": now_s, "nbf": now_s, "exp": now_s + 60}
        url = f"http://{relay.address}"
        answers = [
            await relay.http.get(
                "/mcp", headers={"Authorization": f"Bearer {outside_token(aud=aud, **times)}"}
            )
            for aud in (f"{url}/mcp", url)
        ]
        metadata = await relay.http.get("/.well-known/oauth-protected-resource/mcp")
    assert fetched["keys"] == 1
    assert [answer.status_code == 401 for answer in answers] == [False, True]
    assert metadata.json()["authorization_servers"] == [ISSUER]


# --- faults ---------------------------------------------------------------------------------------------


async def test_metrics_have_a_listener_of_their_own_and_are_nowhere_else(tmp_path: Path) -> None:
    async with running_relay(tmp_path) as relay:
        page = await relay.metrics.get("/metrics")
        others = [await relay.metrics.get(path) for path in ("/healthz", "/mcp", "/schemas/")]
        public = await relay.http.get("/metrics")
    assert (page.status_code, page.headers["content-type"][:25]) == (200, "text/plain; version=0.0.4")
    assert "edge_relay_ready 0.0" in page.text
    assert [answer.status_code for answer in others] == [404] * 3
    assert (public.status_code, "edge_relay" in public.text) == (404, False)
    assert not relay.lines.entries(OLD_METRICS)


async def test_metrics_on_an_address_are_read_under_the_names_of_loopback_alone(tmp_path: Path) -> None:
    listen = HostPort("127.0.0.1", unused_port())
    async with (
        running_relay(tmp_path, metrics_listen=listen),
        httpx2.AsyncClient(base_url=f"http://{listen}", trust_env=False) as http,
    ):
        hosts = (str(listen), "localhost:1", "evil.example", f"127.0.0.1.evil.example:{listen.port}")
        answers = [await http.get("/metrics", headers={"Host": host}) for host in hosts]
        with pytest.raises(InvalidStatus):
            await connect(f"ws://{listen}/metrics")
    assert [answer.status_code for answer in answers] == [200, 200, 421, 421]


async def test_a_relay_that_serves_tls_has_metrics_where_they_were_and_warns_of_it(tmp_path: Path) -> None:
    state, port = StateFiles(tmp_path), unused_port()
    tls = {"public_url": f"https://127.0.0.1:{port}", "tls": state.own_tls, "own_root": True}
    async with running_relay(tmp_path, port, metrics_listen=None, **tls) as relay:
        roots = CertificateAuthority(state.ca, now_ms, os.urandom).servers.roots()
        context = client_context("".join(roots))
        async with httpx2.AsyncClient(verify=context, trust_env=False) as http:
            local = await http.get(f"https://127.0.0.1:{port}/metrics")
        line = await relay.lines.until(OLD_METRICS)
    assert (local.status_code, line["level"]) == (200, "warning")


async def test_a_relay_behind_a_proxy_of_its_machine_that_is_not_named_says_what_to_set(
    tmp_path: Path,
) -> None:
    async with running_relay(tmp_path, public_url="https://relay.example") as relay:
        line = await relay.lines.until(UNNAMED_PROXY)
    assert line["level"] == "warning"


def planted(*_arguments: object) -> NoReturn:
    raise LookupError("planted\x1b[31m " + "c2VjcmV0" * 8)


def check_told(line: Mapping[str, Any]) -> None:
    assert line["error"] == r"LookupError: planted\x1b[31m (left out)"
    assert "in planted: raise LookupError" in line["exception"]


async def test_a_bug_in_an_http_handler_is_logged_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_relay(tmp_path) as relay:
        with monkeypatch.context() as bug:
            bug.setattr(Metrics, "render", planted)
            answers = [await relay.metrics.get("/metrics") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [500] * 3
        assert "planted" not in answers[0].text
        assert await relay.faults("uvicorn") == 3
    # Lines are written on a thread, after they are counted; all are when the relay has ended.
    (line,) = relay.lines.entries("a library reports")
    check_told(line)
    assert (line["library"], line["level"]) == ("uvicorn", "error")


@pytest.mark.parametrize("kind", [LookupError, RuntimeError, OSError])
async def test_a_bug_in_the_nodes_handler_is_logged_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def broken(*_arguments: object) -> NoReturn:
        raise kind("planted")

    async with running_relay(tmp_path) as relay:
        with monkeypatch.context() as bug:
            bug.setattr(Handshake, "challenge", broken)
            for _ in range(2):
                async with connect(
                    f"ws://{relay.address}{CONNECT_PATH}", subprotocols=[Subprotocol(SUBPROTOCOL)]
                ) as socket:
                    await socket.wait_closed()
        assert await relay.faults("uvicorn") == 2
    (line,) = relay.lines.entries("a library reports")
    assert line["error"] == f"{kind.__name__}: planted"
    assert "in broken: raise kind" in line["exception"]


async def test_a_bug_in_the_background_is_logged_and_counted(tmp_path: Path) -> None:
    async with running_relay(tmp_path) as relay:
        asyncio.get_running_loop().call_soon(planted)
        check_told(await relay.lines.until("fault in the background"))
        assert await relay.faults("asyncio") == 1
    assert relay.lines.entries("relay ended")


async def test_a_bug_in_what_the_relay_cannot_do_without_ends_it_with_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CertificateAuthority(tmp_path / "ca", now_ms, os.urandom).create()
    monkeypatch.setattr(Watcher, "run", planted)
    lines = LogLines()
    with bind(HostPort("127.0.0.1", 0)) as listener:
        listener.listen()
        wanted = config(tmp_path, HostPort(*listener.getsockname()), BrokerAddress("127.0.0.1", 1))
        with pytest.raises(FailedError, match=r"^LookupError: planted"):
            await run_relay(wanted, listener, lines)
    (line,) = lines.entries("program fails")
    assert r"LookupError: planted\x1b[31m (left out)" in line["exception"]
    assert "in planted: raise LookupError" in line["exception"]
    assert line["level"] == "critical"
