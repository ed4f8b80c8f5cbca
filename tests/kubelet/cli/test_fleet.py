import asyncio
import io
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import structlog

from kubelet.announce.mqtt import MqttPublisher
from kubelet.cli.fleet import (
    Counts,
    MadeUpMetrics,
    MockFleet,
    Parts,
    Progress,
    processes_for,
    read_identities,
)
from kubelet.config import NodeConfig
from kubelet.daemon.node import NodeEnvironment
from kubelet.session.link import LinkState
from schemas.addresses import BrokerAddress
from schemas.canonical import jcs
from schemas.error_roots import OperatorError
from schemas.frames import FrameReader
from schemas.identity_files import IdentityFilesError
from schemas.kinds import KindRegistry
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.trust import Known, Outcome, TrustRules
from tests.fakes.chance import FixedChance, short_waits
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.mqtt_listener import MqttListener
from tests.fakes.node import identity_of, write_identity
from tests.fakes.played_relay import PlayedRelay
from tests.fakes.polling import until
from tests.fakes.shipped_kinds import METRICS, SYSTEM_METRICS
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, SimulatedCa, SimulatedNode

BOUND_S = 30


@pytest.mark.parametrize(
    ("nodes", "descriptors", "processes"),
    [(1, 65, 1), (2, 65, 2), (960, 1024, 1), (961, 1024, 2), (10_000, 1024, 11), (10_000, 20_000, 1)],
)
def test_there_are_as_many_processes_as_the_limit_of_open_files_requires(
    nodes: int, descriptors: int, processes: int
) -> None:
    assert processes_for(nodes, descriptors) == processes


def test_a_limit_that_permits_no_connection_is_an_error_with_advice() -> None:
    with pytest.raises(OperatorError, match="ulimit -n"):
        processes_for(1, 64)


def test_progress_is_a_table_whose_columns_are_aligned_and_whose_rows_differ() -> None:
    lines, times = io.StringIO(), iter([100.0, 100.0, 112.34, 160.0])
    progress = Progress(lines, lambda: next(times))
    progress.begin(10_000, 2)
    for counts in (Counts(0, 0, 0), Counts(0, 0, 0), Counts(2_000, 1_998, 0), Counts(10_000, 9_999, 1)):
        progress.show(counts)
    assert lines.getvalue().splitlines() == [
        "10,000 mock nodes in 2 processes; Ctrl-C stops them",
        "  seconds  connected  announced   rejected",
        "      0.0          0          0          0",
        "     12.3      2,000      1,998          0",
        "     60.0     10,000      9,999          1",
    ]


@pytest.mark.integration
async def test_the_counts_of_all_processes_are_added_up() -> None:
    seen: asyncio.Queue[Counts] = asyncio.Queue()
    says = "import time; print({!r}, flush=True); time.sleep(60)"
    commands = [[sys.executable, "-P", "-c", says.format(counts)] for counts in ("3 2 1", "30 20 10")]
    parts = asyncio.create_task(Parts(commands, seen.put_nowait).run())
    async with asyncio.timeout(BOUND_S):
        while await seen.get() != Counts(33, 22, 11):
            pass
    parts.cancel()
    with pytest.raises(asyncio.CancelledError):
        await parts


@pytest.mark.integration
async def test_a_process_that_ends_by_itself_ends_the_fleet(tmp_path: Path) -> None:
    left = tmp_path / "left"
    lasting = f"import os, signal, time; open({str(left)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    ending = f"import os, sys, time\nwhile not os.path.exists({str(left)!r}): time.sleep(0.01)\nsys.exit(3)"
    commands = [[sys.executable, "-P", "-c", code] for code in (lasting, ending)]
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(BOUND_S):
            await Parts(commands, lambda _: None).run()
    assert ended.group_contains(OperatorError, match="ended with exit code 3")
    with pytest.raises(ProcessLookupError):
        os.kill(int(left.read_text()), 0)


@pytest.mark.integration
def test_one_interrupt_ends_all_processes_of_a_fleet(tmp_path: Path, ca: SimulatedCa) -> None:
    for node_id in (NODE_ID, OTHER_NODE_ID):
        write_identity(tmp_path / "mocks" / node_id, ca.issue(node_id))
    fleet = f"{sys.executable} -P -m kubelet fleet --broker 127.0.0.1:9 --relay http://127.0.0.1:9"
    with subprocess.Popen(
        # 65 open files: one connection in each process.
        ["/bin/sh", "-c", f"ulimit -n 65; exec {fleet} --identities {tmp_path / 'mocks'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        shown = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=BOUND_S)
    assert shown[0] == "2 mock nodes in 2 processes; Ctrl-C stops them\n"
    assert shown[2].split()[1:] == ["0", "0", "0"]
    assert (process.returncode, errors) == (0, "")


ALL_PARTS = {"cpu", "mem", "load", "disk"}


def made_up(clock: FakeClock) -> MadeUpMetrics:
    return MadeUpMetrics(METRICS, NODE_ID, clock, structlog.get_logger())


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        pytest.param({}, ALL_PARTS, id="all of it"),
        pytest.param({"include": ["cpu"]}, {"cpu"}, id="one part"),
        pytest.param({"include": ["disk", "load"]}, {"disk", "load"}, id="two parts"),
        pytest.param({"include": ["uptime"]}, set(), id="what is always there"),
    ],
)
async def test_made_up_metrics_look_like_those_of_a_board(
    clock: FakeClock, registry: SchemaRegistry, arguments: dict[str, Any], parts: set[str]
) -> None:
    verb = SYSTEM_METRICS.verbs["snapshot"]
    handler = made_up(clock)
    assert registry.load(verb.input_ref).is_valid(arguments)
    await handler.invoke("snapshot", {})
    clock.advance(90_500)
    sample = await handler.invoke("snapshot", arguments)
    registry.load(verb.output_ref).check(sample)
    assert set(sample) == {"ts_ms", "node_id", "uptime_s"} | parts
    assert (sample["ts_ms"], sample["node_id"], sample["uptime_s"]) == (NOW_MS + 90_500, NODE_ID, 90)


async def test_made_up_uptime_is_never_negative(clock: FakeClock) -> None:
    handler = made_up(clock)
    await handler.invoke("snapshot", {})
    clock.advance(-1)
    assert (await handler.invoke("snapshot", {}))["uptime_s"] == 0


@pytest.fixture
def nodes(ca: SimulatedCa) -> list[SimulatedNode]:
    return [ca.issue(NODE_ID), ca.issue(OTHER_NODE_ID)]


def test_identities_are_read_in_the_order_of_their_names(tmp_path: Path, nodes: list[SimulatedNode]) -> None:
    for name, node in zip(["b", "a"], nodes, strict=True):
        write_identity(tmp_path / name, node)
    (tmp_path / "README").write_text("not an identity")
    assert [identity.node_id for identity in read_identities(tmp_path)] == [OTHER_NODE_ID, NODE_ID]


@pytest.mark.parametrize("name", ["missing", "README", "empty"])
def test_a_directory_without_identities_is_refused_with_advice(tmp_path: Path, name: str) -> None:
    (tmp_path / "README").write_text("not a directory")
    (tmp_path / "empty").mkdir()
    with pytest.raises(IdentityFilesError, match="run `relay ca issue --mock N --out DIR`"):
        read_identities(tmp_path / name)


def test_one_damaged_identity_is_not_passed_over(tmp_path: Path, nodes: list[SimulatedNode]) -> None:
    write_identity(tmp_path / "a", nodes[0])
    write_identity(tmp_path / "b", nodes[1]).node_id.write_text("no node id")
    with pytest.raises(IdentityFilesError, match="holds no node id"):
        read_identities(tmp_path)


async def test_every_mock_node_announces_and_answers_for_itself(  # noqa: PLR0913, PLR0917 - a whole fleet
    nodes: list[SimulatedNode],
    broker: BrokerAddress,
    reader: FrameReader,
    registry: SchemaRegistry,
    kinds: KindRegistry,
    clock: FakeClock,
    log: LogLines,
) -> None:
    by_id = {node.node_id: node for node in nodes}
    rules = TrustRules(registry, kinds)
    listener = MqttListener(broker, "$devices/+/announce")
    async with PlayedRelay(reader).running() as relay, listener.listening():
        environment = NodeEnvironment(
            config=NodeConfig(broker, relay.url),
            publisher=MqttPublisher(broker, "edge-fleet-test", make_logger("kubelet", log), short_waits()),
            registry=registry,
            reader=reader,
            kinds=kinds,
            now_ms=clock,
            random_bytes=os.urandom,
            rng=FixedChance(0.5),
            log=make_logger("kubelet", log),
        )
        fleet = MockFleet([identity_of(node) for node in nodes], environment)
        assert fleet.counts() == Counts(0, 0, 0)
        task = asyncio.create_task(fleet.run())
        seen, ends = set(), []
        for _ in nodes:
            end = await relay.next()
            ends.append(end)
            node_id = (await end.admit()).payload["node_id"]
            wire = jcs((await end.accept()).payload)
            identity = by_id[node_id].identity()
            verdict = rules.accept(wire, node_id, NOW_MS, Known({identity.kid: identity}))
            assert verdict.outcome is Outcome.ACCEPTED
            for tool, arguments in (("sysecho.{}.echo.invoke", {"message": "hi"}),
                                    ("sys.{}.sysmetrics.snapshot", {})):  # fmt: skip
                answer = await end.command(tool=tool.format(node_id), arguments=arguments)
                assert answer.payload["result"]["node_id"] == node_id
            seen.add(node_id)
        assert fleet.counts() == Counts(connected=2, announced=2, rejected=0)
        topics = {(await listener.next()).topic for _ in nodes}
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert seen == set(by_id)
        assert topics == {f"$devices/{node_id}/announce" for node_id in by_id}
        for end in ends:
            assert (await end.receive("bye")).payload == {"reason": "shutting_down"}
    assert environment.publisher.publish("$devices/x/announce", b"", retain=False) is False


@pytest.mark.parametrize(("patience_s", "left"), [(60.0, LinkState.OPEN), (0.05, LinkState.CONNECTING)])
async def test_only_so_many_nodes_connect_at_once(
    monkeypatch: pytest.MonkeyPatch, patience_s: float, left: LinkState
) -> None:
    started: list[Any] = []

    class Slow:
        def __init__(self, *_: object, **__: object) -> None:
            self.link = SimpleNamespace(state=LinkState.CONNECTING)

        async def run(self) -> None:
            started.append(self)
            await asyncio.Event().wait()

    for name, value in (("Node", Slow), ("_MAX_CONNECTING", 2), ("_CONNECT_S", patience_s)):
        monkeypatch.setattr(f"kubelet.cli.fleet.{name}", value)
    publisher = SimpleNamespace(start=lambda: None, stop=AsyncMock())
    fleet = MockFleet([Mock(node_id=NODE_ID)] * 3, Mock(publisher=publisher, now_ms=lambda: NOW_MS))
    task = asyncio.create_task(fleet.run())
    await until(lambda: len(started) == 2)
    if left is LinkState.OPEN:
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(started) == 2
    # The next one starts when one has connected, or could not for a while.
    started[0].link.state = left
    await until(lambda: len(started) == 3)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
