"""20. A small fleet, for which no broker is set up: the relay runs one.

Steps: run the relay · enrol a node, run it and call it · the broker is killed, and comes back · the relay is
killed, and takes the same broker address again · it stops, and leaves nothing running · the same over TLS,
where a revoked node loses the broker · a broker of one's own takes over · its store is full · no broker at
all, and said so.
"""

import asyncio
import json
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from relay.cli.demo.processes import StartError
from tests.fakes.broker import Broker, fill
from tests.fakes.polling import until
from tests.fakes.small_fleet import SmallFleet, is_running, small_fleet
from tests.fakes.tls_broker import until as until_peer

pytestmark = pytest.mark.long

_FIRST_CHOICE = 1883


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[SmallFleet]:
    async with small_fleet(tmp_path) as fleet:
        yield fleet


@pytest.fixture
async def secure(tmp_path: Path) -> AsyncIterator[SmallFleet]:
    async with small_fleet(tmp_path, secure=True) as fleet:
        yield fleet


async def until_another_broker(fleet: SmallFleet, pid: int) -> int:
    """Return the process of the broker that was started in place of ``pid``, once it is connected."""
    await until(lambda: fleet.broker_pid != pid)
    await fleet.until_ready()
    return fleet.broker_pid


@pytest.mark.holds("RFC-0001/1/no-broker")
async def test_a_relay_brings_its_broker_and_keeps_its_address_through_every_death(fleet: SmallFleet) -> None:
    await fleet.start_relay(*fleet.listening)
    told = await fleet.enrol("kitchen")
    assert told["broker"] == f"mqtt://127.0.0.1:{fleet.broker_port}"
    await fleet.start_node("kitchen")
    assert await fleet.echo(told["node_id"], "hello") == "hello"
    assert (await fleet.until_ready())["broker_process"] is True
    assert stat.S_IMODE((fleet.state.broker / "store").stat().st_mode) == 0o700
    assert stat.S_IMODE((fleet.state.broker / "nats-server.conf").stat().st_mode) == 0o600

    # The broker dies: it is started again, is counted and logged, and the relay and the node are back on it.
    first = fleet.broker_pid
    os.kill(first, signal.SIGKILL)
    second = await until_another_broker(fleet, first)
    assert await fleet.metric("edge_relay_broker_ends_total") == 1
    await until(lambda: fleet.log("broker ended"))
    assert fleet.log("broker ended")[0]["status"] == -signal.SIGKILL
    assert await fleet.echo(told["node_id"], "still here") == "still here"

    # The relay dies, and its broker with it. Nothing is said to the next one, which has the same broker.
    await fleet.processes.kill("relay")
    await until(lambda: not is_running(second))
    await fleet.start_relay()
    assert fleet.kept["own_broker"] == f"mqtt://127.0.0.1:{fleet.broker_port}"
    assert (await fleet.until_ready())["broker"] is True
    assert await fleet.echo(told["node_id"], "and again") == "and again"

    # What it retains was read from the store: the broker lost nothing.
    last = fleet.broker_pid
    await fleet.processes.stop("relay")
    assert not is_running(last)
    assert fleet.log("broker ended")[1:] == []
    assert not fleet.log("broker killed")


async def test_the_doctor_finds_nothing_on_a_fresh_machine(fleet: SmallFleet) -> None:
    settings = fleet.directory / "relay.toml"
    settings.write_text(
        f'listen = "127.0.0.1:{fleet.port}"\npublic_url = "{fleet.url}"\nbroker_listen = "{fleet.broker}"\n'
    )
    given = ["--config", str(settings), "--state-dir", str(fleet.state.root)]
    relay = fleet.run_command()[:4]
    await fleet.processes.start("relay", [*relay, "run", *given])
    await fleet.processes.until_listening(fleet.port)
    await fleet.until_ready()
    found = await fleet.processes.output([*relay, "doctor", "--json", *given])
    assert {json.loads(line)["severity"] for line in found.splitlines()} == {"ok"}, found


async def test_a_broker_that_outlived_its_relay_is_ended_by_the_next_one(fleet: SmallFleet) -> None:
    await fleet.start_relay(*fleet.listening)
    left = fleet.broker_pid
    # A process that is suspended cannot end by the signal that it gets at its relay's end.
    os.kill(left, signal.SIGSTOP)
    await fleet.processes.kill("relay")
    assert is_running(left)
    await fleet.start_relay()
    await until(lambda: fleet.log("broker of an earlier relay ended"))
    assert fleet.log("broker of an earlier relay ended")[0]["pid"] == left
    assert not is_running(left)
    assert (await fleet.until_ready())["broker"] is True


async def test_a_second_relay_with_the_same_state_leaves_the_broker_alone(
    fleet: SmallFleet,
) -> None:
    await fleet.start_relay(*fleet.listening)
    running = fleet.broker_pid
    files = [fleet.state.root / name for name in ("run.json", "settings.json")]
    before = [file.read_bytes() for file in files]
    again = SmallFleet(fleet.directory, fleet.processes)
    with pytest.raises(StartError, match=r"failed: relay: .*stop it"):
        await fleet.processes.output(again.run_command())
    assert is_running(running)
    assert (await fleet.until_ready())["broker"] is True
    # Nor does it change what the next start of the first one goes by.
    assert [file.read_bytes() for file in files] == before


async def test_a_kept_port_that_another_program_has_is_an_error_and_no_other_is_taken(
    fleet: SmallFleet,
) -> None:
    await fleet.start_relay(*fleet.listening)
    await fleet.processes.stop("relay")
    in_use = rf"127\.0\.0\.1:{fleet.broker_port} is in use.*--broker-listen"
    with (
        socket.create_server(("127.0.0.1", fleet.broker_port)),
        pytest.raises(StartError, match=in_use),
    ):
        await fleet.processes.output(fleet.run_command())
    await fleet.start_relay()
    assert (await fleet.until_ready())["broker"] is True


async def test_over_tls_the_broker_admits_enrolled_nodes_alone_and_a_revoked_one_no_longer(
    secure: SmallFleet,
) -> None:
    await secure.start_relay(*secure.listening)
    told = await secure.enrol("kitchen")
    assert told["broker"] == f"mqtts://127.0.0.1:{secure.broker_port}"
    await secure.start_node("kitchen")
    assert await secure.echo(told["node_id"], "over TLS") == "over TLS"
    # It is admitted as soon as the broker has read that it was enrolled, without a restart of anything.
    await until(lambda: secure.log("broker connected", "kitchen"))
    assert stat.S_IMODE(secure.state.broker_tls.key.stat().st_mode) == 0o600
    stranger = await asyncio.to_thread(secure.peer, None)
    assert not stranger.connected

    await secure.relay("ca", "revoke", told["node_id"])
    shut_out = await asyncio.to_thread(
        until_peer, lambda: secure.peer("kitchen"), lambda peer: not peer.connected
    )
    for peer in (stranger, shut_out):
        peer.close()
    # The next start shows the same certificate, and says nothing of it.
    shown = secure.state.broker_tls.certificate.read_bytes()
    await secure.processes.stop("relay")
    await secure.start_relay()
    await secure.until_ready()
    assert secure.state.broker_tls.certificate.read_bytes() == shown


async def test_a_broker_of_ones_own_takes_over_and_that_is_said(fleet: SmallFleet, tmp_path: Path) -> None:
    await fleet.start_relay(*fleet.listening)
    told = await fleet.enrol("kitchen")
    await fleet.start_node("kitchen")
    await fleet.processes.stop("relay")
    (tmp_path / "vendor").mkdir()
    vendor = Broker("nats-server", tmp_path / "vendor")
    await asyncio.to_thread(vendor.start)
    try:
        await fleet.start_relay("--broker", str(vendor.address))
        await until(fleet.said)
        said = f"the broker is {vendor.address} from now on, and no longer the relay's own at {fleet.broker}"
        assert said in fleet.said()[-1]
        assert "broker_process" not in await fleet.until_ready()
        # The node was told the former address: its session carries its manifest all the same.
        assert await fleet.echo(told["node_id"], "by the session") == "by the session"
    finally:
        await asyncio.to_thread(vendor.stop)


async def test_a_broker_whose_store_is_full_leaves_the_sessions_and_that_is_said(
    fleet: SmallFleet, tmp_path: Path
) -> None:
    (tmp_path / "vendor").mkdir()
    vendor = Broker("nats-server", tmp_path / "vendor", small=True)
    await asyncio.to_thread(vendor.start)
    try:
        await asyncio.to_thread(fill, vendor.address)
        await fleet.start_relay("--broker", str(vendor.address))
        told = await fleet.enrol("kitchen")
        await fleet.start_node("kitchen")
        assert await fleet.echo(told["node_id"], "by the session") == "by the session"
        assert (await fleet.until_ready())["broker"] is False
        page = await fleet.ready()
        assert page["subsystems"]["broker"]["state"].startswith("not connected: nodes announce themselves by")
        await until(lambda: fleet.log("broker not reached"))
        assert "its store is full" in fleet.log("broker not reached")[0]["reason"]
        await until(lambda: fleet.log("going on by the nodes' sessions, without the broker"))
    finally:
        await asyncio.to_thread(vendor.stop)


@pytest.mark.holds("RFC-0001/1/mqtt-only", "RFC-0001/1/no-broker")
async def test_without_a_broker_the_sessions_carry_everything_and_that_is_said(fleet: SmallFleet) -> None:
    await fleet.start_relay("--no-broker")
    await until(lambda: fleet.log("relay started"))
    assert fleet.log("relay started")[0]["broker"] == "none: sessions alone"
    told = await fleet.enrol("kitchen")
    assert told["broker"] is None
    await fleet.start_node("kitchen")
    assert await fleet.echo(told["node_id"], "no broker") == "no broker"
    await until(lambda: fleet.log("no broker: the session alone", "kitchen"))
    subsystems = await fleet.until_ready()
    assert not {"broker", "broker_process"} & subsystems.keys()
    assert await fleet.metric("edge_relay_inventory_missing") == 0
    # Never implied: no broker of its own was begun.
    assert "own_broker" not in fleet.kept
    assert not (fleet.state.broker / "store").exists()
    await fleet.processes.stop("kitchen")
    retire = ["retire", "--yes", "--state-dir", str(fleet.directory / "kitchen")]
    assert "is retired" in await fleet.processes.output([*fleet.run_command()[:3], "kubelet", *retire])


async def test_a_free_port_is_taken_at_the_first_start_and_kept(fleet: SmallFleet) -> None:
    with ExitStack() as held:
        with suppress(OSError):  # else another program has the first choice of every relay
            held.enter_context(socket.create_server(("127.0.0.1", _FIRST_CHOICE)))
        await fleet.start_relay()
        kept = fleet.kept["own_broker"]
        assert not kept.endswith(f":{_FIRST_CHOICE}")
        await fleet.processes.stop("relay")
        await fleet.start_relay()
        assert fleet.kept["own_broker"] == kept
        assert (await fleet.until_ready())["broker"] is True
