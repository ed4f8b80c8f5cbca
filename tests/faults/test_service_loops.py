"""A service loop returns, as none may: without it the program would run on, and not do what it is for.

The program ends, and its error names the loop. The system's service manager starts it again. Only a handler's
loop begins again by itself: a board that cannot read a disk is still to be reached.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kubelet.announce.announcer import Announcer
from kubelet.announce.mqtt import MqttPublisher
from kubelet.config import DaemonPlan, NodeConfig
from kubelet.daemon.composition import run_daemon
from kubelet.handlers.disks import Disks
from kubelet.handlers.system_metrics import CpuSampler
from kubelet.loopback import LoopbackServer
from relay.audit.refusal_counts import RefusalCounter
from relay.calls.canaries import Canaries
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.mqtt_feed import MqttFeed
from relay.fleet.replay_marks import MarkStore
from relay.http.listener import Acceptor, bind
from relay.pki.authority import CertificateAuthority
from relay.pki.relay_tls import RelayTls
from relay.server.decisions import FollowUps
from relay.server.serving import run_relay
from relay.settings.config import RelayConfig, StateFiles
from relay.settings.environment import now_ms
from relay.state.watcher import Watcher
from relay.streams.caller_tools.endings import Expiry
from relay.streams.telemetry.hub import TelemetryHub
from schemas.addresses import BrokerAddress, HostPort
from schemas.faults import FailedError
from schemas.process.service_manager import ServiceManager
from tests.fakes.daemon import NO_BROKER, NO_RELAY
from tests.fakes.lines import LogLines

BOUND_S = 30


async def returns(*_: object) -> None:
    """Stand for a loop that ends."""


@pytest.mark.parametrize(
    ("loop", "named"),
    [
        (RefusalCounter, "refusals"),
        (RelayTls, "certificates"),
        (MqttFeed, "broker"),
        (MarkStore, "marks"),
        (ChangeNotifier, "inventory"),
        (TelemetryHub, "telemetry"),
        (Canaries, "calls"),
        (Expiry, "caller sessions"),
        (Watcher, "decisions"),
        (FollowUps, "follow-ups"),
        (Acceptor, "listener"),
        (ServiceManager, "service manager"),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else "",
)
async def test_a_loop_of_the_relay_that_returns_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: type, named: str
) -> None:
    monkeypatch.setattr(loop, "run", returns)
    CertificateAuthority(tmp_path / "ca", now_ms, os.urandom).create()
    lines = LogLines()
    with bind(HostPort("127.0.0.1", 0)) as listener:
        listen = HostPort(*listener.getsockname())
        config = RelayConfig(BrokerAddress("127.0.0.1", 1), f"http://{listen}", listen, StateFiles(tmp_path))
        await ends(run_relay(config, listener, lines), lines, named)


async def ends(running: Awaitable[None], lines: LogLines, named: str) -> None:
    """Check that a program ends because of the loop ``named``, and leaves a traceback."""
    with pytest.raises(FailedError, match=rf"the service loop '{named}' has ended"):
        await asyncio.wait_for(running, BOUND_S)
    assert [line["level"] for line in lines.entries("program fails")] == ["critical"]


def publisher_ends(publisher: MqttPublisher) -> None:
    publisher.ended.set()


def loopback_ends(server: LoopbackServer, _inner: object) -> None:
    server._on_end()  # noqa: SLF001 - a fault


def plan_of_a_node(directory: Path) -> DaemonPlan:
    ca = CertificateAuthority(directory / "ca", now_ms, os.urandom)
    ca.create()
    (node_id,) = ca.issue_mock(1, directory / "nodes", "acme")
    return DaemonPlan(NodeConfig(NO_BROKER, NO_RELAY), directory / "nodes" / node_id, 0, None)


@pytest.mark.parametrize(
    ("loop", "method", "fault", "named"),
    [
        pytest.param(Announcer, "run", returns, "manifest", id="announcer"),
        pytest.param(MqttPublisher, "start", publisher_ends, "broker", id="thread of the broker"),
        pytest.param(LoopbackServer, "_serve", loopback_ends, "loopback", id="thread of the loopback pages"),
        pytest.param(ServiceManager, "run", returns, "service manager", id="service manager"),
    ],
)
async def test_a_loop_of_the_node_that_returns_ends_it(  # noqa: PLR0913, PLR0917 - the table's columns
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loop: type,
    method: str,
    fault: Callable[..., object],
    named: str,
) -> None:
    monkeypatch.setattr(loop, method, fault)
    lines = LogLines()
    await ends(run_daemon(plan_of_a_node(tmp_path), lines), lines, named)


@pytest.mark.parametrize(("loop", "named"), [(CpuSampler, "cpu"), (Disks, "disks")])
async def test_a_loop_of_a_handler_that_returns_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: type, named: str
) -> None:
    monkeypatch.setattr(loop, "run", returns)
    lines = LogLines()
    running = asyncio.create_task(run_daemon(plan_of_a_node(tmp_path), lines))
    failed = await lines.until("background work failed")
    assert f"the service loop '{named}' has ended" in failed["exception"]
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])
