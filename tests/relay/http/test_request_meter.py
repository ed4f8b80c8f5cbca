"""How the meter divides what sources send, on a clock that the test sets; and what it does to connections."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from ipaddress import ip_network

import httpx2
import pytest
import pytest_asyncio

from relay.http.proxies import TrustedProxies
from relay.http.request_meter import (
    HEALTH_PER_S,
    METRICS_PER_S,
    PER_ADDRESS,
    PER_MACHINE,
    PER_TURN,
    THIS_MACHINE,
    RequestMeter,
    RequestSource,
    Share,
    SourceKind,
    share_of,
    waiting_log,
)
from relay.limits.rate_limits import Allowance
from schemas.frames import SUBPROTOCOL
from schemas.process.logs import make_logger
from tests.fakes.hub import Hub
from tests.fakes.lines import LogLines
from tests.fakes.polling import until
from tests.fakes.raw_http import until_closed, ws_frame
from tests.fakes.seconds import Seconds
from tests.fakes.served_relay import Reply, ServedRelay, mcp_request
from tests.fakes.serving import Server

HERE = "127.0.0.1"
HOME, OFFICE = RequestSource.of_group("203.0.113.7"), RequestSource.of_group("203.0.113.8")
AGENT = RequestSource(SourceKind.AGENT, ("https://relay.example", "acme", "agent-1"))
MANY = 1_000_000.0


class Meter:
    """A meter on a clock of the test, and what has to wait."""

    def __init__(self) -> None:
        self.seconds = Seconds()
        self.waited: list[RequestSource] = []
        self.meter = RequestMeter(Allowance(10, 30, 5), self.seconds, self.waited.append)

    def at_once(self, source: RequestSource, share: Share = Share.REQUESTS) -> int:
        """Return how many are let through before one has to wait."""
        taken = 0
        while self.meter.take(source, share, 1):
            taken += 1
        return taken


@pytest.fixture
def meter() -> Meter:
    return Meter()


def test_each_source_has_a_rate_of_its_own(meter: Meter) -> None:
    assert meter.at_once(HOME) == PER_ADDRESS
    assert meter.at_once(OFFICE) == PER_ADDRESS
    assert meter.at_once(THIS_MACHINE) == PER_MACHINE
    assert meter.waited == [HOME, OFFICE, THIS_MACHINE]
    meter.seconds.now += 0.5
    assert meter.at_once(HOME) == PER_ADDRESS / 2


def test_health_and_metrics_have_shares_that_nothing_else_takes(meter: Meter) -> None:
    assert meter.at_once(HOME) == PER_ADDRESS
    assert meter.at_once(HOME, Share.HEALTH) == HEALTH_PER_S
    assert meter.at_once(HOME, Share.METRICS) == 10
    assert meter.at_once(HOME, Share.CONNECTIONS) == PER_ADDRESS / 2
    meter.seconds.now += 1
    assert meter.at_once(HOME, Share.METRICS) == METRICS_PER_S


def test_an_agents_rate_is_above_that_of_its_calls_and_never_too_low_to_begin(meter: Meter) -> None:
    assert meter.at_once(AGENT) == 60
    meter.meter.change(Allowance(100, 300, 5))
    meter.seconds.now += 10
    assert meter.at_once(AGENT) == 125
    meter.seconds.now += 1
    assert meter.at_once(AGENT) == 125


def test_what_costs_more_than_there_can_be_takes_all_of_it(meter: Meter) -> None:
    assert meter.meter.take(AGENT, Share.REQUESTS, MANY)
    assert not meter.meter.take(AGENT, Share.REQUESTS, 1)


@pytest.mark.parametrize(
    ("start", "share"),
    [
        (b"GET /healthz HTTP/1.1\r\n", Share.HEALTH),
        (b"HEAD /readyz HTTP/1.1\r\n", Share.HEALTH),
        (b"GET /readyz?verbose HTTP/1.1\r\n", Share.HEALTH),
        (b"GET /metrics HTTP/1.1\r\n", Share.METRICS),
        (b"GET /healthz/../mcp HTTP/1.1\r\n", Share.REQUESTS),
        (b"POST /healthz HTTP/1.1\r\n", Share.REQUESTS),
        (b"GET /heal", Share.REQUESTS),
        (b"GET  /healthz HTTP/1.1\r\n", Share.REQUESTS),
        (b"GET http://a/healthz HTTP/1.1\r\n", Share.REQUESTS),
        (b"", Share.REQUESTS),
    ],
)
def test_the_share_is_known_by_the_first_bytes(start: bytes, share: Share) -> None:
    assert share_of(start) is share


async def test_connections_wait_in_turn_and_those_that_were_not_served_yet_come_first(meter: Meter) -> None:
    meter.at_once(HOME)
    order: list[str] = []
    for name, is_new in (("a", False), ("b", False), ("new", True)):
        resume = partial(order.append, name)
        assert meter.meter.enter(HOME, Share.REQUESTS, 1, resume, is_new=is_new) is not None
    assert not meter.meter.take(HOME, Share.REQUESTS, 0.001)  # none passes those that wait
    meter.seconds.now += 1
    await until(lambda: len(order) == 3)
    assert order == ["new", "a", "b"]
    assert meter.meter.take(HOME, Share.REQUESTS, 1)


async def test_in_one_turn_a_source_begins_a_few_and_others_come_between(meter: Meter) -> None:
    order: list[str] = []
    for number in range(3 * PER_TURN):
        resume = partial(order.append, "flood")
        if meter.meter.enter(HOME, Share.REQUESTS, 1, resume, is_new=number == 0) is None:
            order.append("flood")
    assert len(order) == PER_TURN
    assert meter.meter.enter(OFFICE, Share.REQUESTS, 1, partial(order.append, "other"), is_new=True) is None
    asyncio.get_running_loop().call_soon(order.append, "other")
    await until(lambda: len(order) >= 2 * PER_TURN + 1)
    assert order.index("other") <= 2 * PER_TURN
    assert meter.waited == []  # for a turn, and not for the rate


async def test_one_that_has_left_holds_up_no_other(meter: Meter) -> None:
    meter.at_once(HOME)
    order: list[str] = []
    leaves = partial(order.append, "left")
    lane = meter.meter.enter(HOME, Share.REQUESTS, PER_ADDRESS, leaves, is_new=False)
    assert lane is not None
    meter.meter.enter(HOME, Share.REQUESTS, 1, partial(order.append, "stays"), is_new=False)
    lane.leave(leaves)
    meter.seconds.now += 0.5
    await until(lambda: bool(order))
    assert order == ["stays"]


def test_what_waits_is_logged_once_a_minute_by_kind() -> None:
    lines, seconds = LogLines(), Seconds()
    report = waiting_log(make_logger("relay", lines), seconds)
    for source in (HOME, OFFICE, AGENT, HOME):
        report(source)
    seconds.now += 61
    report(HOME)
    logged = lines.entries("requests over their rate wait")
    assert [(line["source"], line.get("address"), line["kept_back"]) for line in logged] == [
        ("address", "203.0.113.7", 0),
        ("agent", None, 0),
        ("address", "203.0.113.7", 2),
    ]


# --- behind a proxy


class BehindProxy:
    """A relay that every client reaches by a proxy of this machine, and its meter, whose clock stands."""

    def __init__(self, relay: ServedRelay, server: Server) -> None:
        self.relay = relay
        self.meter = server.connections.meter = RequestMeter(Allowance(10, 30, 5), Seconds())

    def use_up(self, source: RequestSource) -> None:
        while self.meter.take(source, Share.REQUESTS, 1):
            pass

    async def get(self, path: str, client: str | None = None) -> Reply:
        return await self.relay.ask(f"GET {path}", [] if client is None else [("X-Forwarded-For", client)])

    async def list_tools(self, token: str) -> int:
        headers = [("X-Forwarded-For", "203.0.113.7")]
        return (await self.relay.mcp("tools/list", token=token, headers=headers)).status


@pytest_asyncio.fixture
async def behind_proxy(hub: Hub) -> AsyncIterator[BehindProxy]:
    proxies = TrustedProxies([ip_network(HERE)])
    async with Server.running(proxies=proxies) as server, ServedRelay.open(hub, server) as relay:
        yield BehindProxy(relay, server)


@pytest.mark.integration
async def test_behind_a_proxy_a_client_over_its_rate_is_refused_and_no_other(
    behind_proxy: BehindProxy,
) -> None:
    behind_proxy.use_up(HOME)
    refused = await behind_proxy.get("/", "203.0.113.7")
    assert (refused.status, refused.json()["error"], refused.headers["retry-after"]) == (429, "rate", "1")
    assert behind_proxy.relay.hub.counted("requests_refused_total", reason="rate") == 1
    assert (await behind_proxy.get("/healthz", "203.0.113.7")).status == 200
    assert (await behind_proxy.get("/", "203.0.113.8")).status == 200
    assert (await behind_proxy.get("/")).status == 200  # of the proxy's own


@pytest.mark.integration
async def test_behind_a_proxy_an_agent_that_is_known_is_charged_and_not_its_address(
    behind_proxy: BehindProxy,
) -> None:
    hub = behind_proxy.relay.hub
    token = hub.token()
    assert await behind_proxy.list_tools(token) == 200
    behind_proxy.use_up(HOME)
    assert await behind_proxy.list_tools(token) == 200
    assert await behind_proxy.list_tools(hub.token(sub="another")) == 429
    behind_proxy.use_up(RequestSource(SourceKind.AGENT, hub.authenticator.identify(token).name))
    assert await behind_proxy.list_tools(token) == 429


@pytest.mark.integration
async def test_an_agent_over_its_rate_is_refused_on_the_connection_that_it_has(
    behind_proxy: BehindProxy,
) -> None:
    """Nothing is made for it there that does not run: Python would warn of that, which fails the test."""
    hub = behind_proxy.relay.hub
    token = hub.token()
    body, headers = mcp_request("tools/list", {})
    headers += [("X-Forwarded-For", "203.0.113.7"), ("Authorization", f"Bearer {token}")]
    statuses = []
    async with httpx2.AsyncClient(base_url=f"http://{behind_proxy.relay.address}") as http:
        for _ in range(3):
            statuses.append((await http.post("/mcp", content=body, headers=headers)).status_code)
            if len(statuses) == 2:
                behind_proxy.use_up(RequestSource(SourceKind.AGENT, hub.authenticator.identify(token).name))
    assert statuses == [200, 200, 429]


@pytest.mark.integration
async def test_behind_a_proxy_a_node_counts_towards_its_own_address(behind_proxy: BehindProxy) -> None:
    head = [
        "GET /devices/connect HTTP/1.1",
        f"Host: {behind_proxy.relay.address}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Protocol: {SUBPROTOCOL}",
        "X-Forwarded-For: 203.0.113.7",
    ]
    said = "\r\n".join([*head, "", ""]).encode()
    reader, writer = await behind_proxy.relay.connect()
    writer.write(said)
    async with asyncio.timeout(30):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    writer.write(ws_frame(b"no frame of ours"))
    await until_closed(reader)
    writer.close()
    await behind_proxy.relay.until_idle()
    assert [line[:2] for line in behind_proxy.relay.refusals()] == [("node_refused", "203.0.113.7")]
    behind_proxy.use_up(HOME)
    assert await behind_proxy.relay.exchange(said) == b""
