import asyncio
import os
import re
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from relay.cluster.credentials import CredentialsError, new_nkey, read_credentials
from relay.routing.port import NoResponderError
from relay.settings.config import ClusterConfig, ClusterServer
from schemas.files import PRIVATE, PUBLIC, write_atomic
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import Member, Trial, echo
from tests.fakes.cluster_server import NatsServer, TlsNatsServer
from tests.fakes.polling import BOUND_S, until
from tests.fakes.routers import ScriptedRouter, echoed
from tests.fakes.signer import NODE_ID, SimulatedCa

pytestmark = pytest.mark.integration


def bytes_of(number: int) -> Callable[[int], bytes]:
    """Return what stands for randomness."""
    return lambda count: number.to_bytes(count, "big")


async def test_a_lost_connection_is_made_again_and_the_works_begin_anew(
    asker: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    async with Member.joined(nats.config, tmp_path / "other", registry, ScriptedRouter()) as owner:
        await owner.hold(NODE_ID, asker)
        nats.stop()
        await until(lambda: not (asker.part.connection.is_connected or owner.part.connection.is_connected))
        with pytest.raises(NoResponderError):
            await asker.part.connection.request("edge.main.cmd.x", b"", BOUND_S)
        nats.start()
        await until(lambda: asker.part.connection.is_connected and owner.part.connection.is_connected)
        await asker.until_reached(NODE_ID)
        assert await asker.part.router.run(echo(NODE_ID)) == echoed(echo(NODE_ID))


async def test_a_connection_that_is_half_open_is_given_up(nats: NatsServer) -> None:
    async with Trial(nats.config, probe_interval_s=0.05) as trial:
        await trial.lines.until("cluster connected")
        nats.suspend()
        try:
            lost = await trial.lines.until("cluster lost")
            assert lost["reason"] == "the server does not answer within 2 s"
            assert trial.connection.problem == lost["reason"]
            assert not trial.connection.is_connected
        finally:
            nats.resume()
        await trial.lines.until("cluster connected", 2)


async def test_an_error_of_what_uses_the_connection_is_the_reason_for_which_it_is_lost(
    nats: NatsServer,
) -> None:
    async def refused(_client: Client) -> None:
        raise NatsError("maximum bytes exceeded")

    trial = Trial(nats.config)
    trial.connection.during(refused)
    async with trial:
        assert (await trial.lines.until("cluster lost"))["reason"] == "maximum bytes exceeded"


async def test_a_server_that_does_not_know_the_relay_is_tried_again(
    nats: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    foreign = NatsServer(tmp_path_factory.mktemp("foreign")).credentials
    async with Trial(replace(nats.config, credentials=foreign)) as trial:
        refused = await trial.lines.until("cluster not connected")
        assert refused["reason"].startswith("the server does not admit what --cluster-credentials names")
        # It is tried again and again, and that is said once.
        await until(lambda: trial.pauses >= 3)
        assert not trial.connection.is_connected
        assert len(trial.lines.entries("cluster not connected")) == 1
    assert foreign.read_text().strip() not in trial.lines.getvalue()


async def test_of_several_servers_the_next_is_tried(nats: NatsServer) -> None:
    (good,) = nats.config.servers
    away = replace(good, port=1)
    async with Trial(replace(nats.config, servers=(away, good))) as trial:
        assert (await trial.lines.until("cluster connected"))["server"] == nats.url
        assert trial.lines.entries("cluster not connected")[0]["server"] == str(away)
        assert trial.pauses == 0  # there is one once each was tried


async def test_relays_with_one_list_of_servers_spread_over_them(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    (good,) = nats.config.servers
    names = replace(nats.config, servers=(good, replace(good, host="localhost")))
    async with AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(
                Member.joined(names, tmp_path / str(number), registry, random_bytes=bytes_of(number))
            )
            for number in range(8)
        ]
        assert {member.part.connection.server for member in members} == set(names.servers)


async def test_it_moves_to_another_server_that_is_better_and_to_no_other(nats: NatsServer) -> None:
    (good,) = nats.config.servers
    same, away = replace(good, host="localhost"), replace(good, port=1)
    trial, ends = Trial(replace(nats.config, servers=(good, away, same))), asyncio.Event()

    async def serve(_client: Client) -> None:
        await ends.wait()
        ends.clear()

    async def passes(_client: Client) -> None:
        return

    async def fails(_client: Client) -> None:
        raise NatsError

    trial.connection.during(serve)
    async with trial:
        await trial.lines.until("cluster connected")
        assert not await trial.connection.move(fails, "of no use")
        assert await trial.connection.move(passes, "of no use")
        ends.set()
        assert (await trial.lines.until("cluster connected", 2))["server"] == str(same)
    (left,) = trial.lines.entries("cluster server left")
    assert (left["server"], left["to"], left["reason"]) == (str(good), str(same), "of no use")


async def test_it_ends_also_when_the_library_swallows_the_cancellation(nats: NatsServer) -> None:
    clients, let_go = list[Client](), asyncio.Event()

    async def swallows(client: Client) -> None:
        clients.append(client)
        while not let_go.is_set():
            with suppress(asyncio.CancelledError):
                await let_go.wait()

    trial = Trial(nats.config)
    trial.connection.before(swallows)
    async with asyncio.timeout(BOUND_S):
        async with trial:
            await until(lambda: clients)
    let_go.set()
    await until(lambda: all(client.is_closed for client in clients))
    assert trial.lines.entries("cluster connected") == []


async def test_what_relay_cluster_init_has_made_admits_a_relay_by_its_certificate(
    tmp_path: Path, registry: SchemaRegistry
) -> None:
    with TlsNatsServer.running(tmp_path) as server:
        async with (
            Member.joined(server.config, tmp_path / "one", registry) as asker,
            Member.joined(server.config, tmp_path / "other", registry) as owner,
        ):
            await owner.hold(NODE_ID, asker)
            assert await asker.part.router.run(echo(NODE_ID)) == echoed(echo(NODE_ID))
            await until(lambda: asker.part.presence.is_current and asker.part.ledgers.is_current)
        now_ms = time.time_ns() // 1_000_000
        stranger = server.credentials_of("stranger", SimulatedCa("of others", now_ms), now_ms)
        async with Trial(replace(server.config, credentials=stranger)) as trial:
            await trial.lines.until("cluster not connected")
        async with Trial(replace(server.config, root=None)) as trial:
            refused = await trial.lines.until("cluster not connected")
            assert refused["reason"].startswith("the certificate is not trusted: ")
            assert "--cluster-root" in refused["reason"]


@pytest.mark.parametrize(
    "greeting",
    [
        b"INFO\r\n",
        b"INFO []\r\n",
        b'INFO {"connect_urls": 5}\r\n',
        b"INFO {" + b" " * 200_000,
        b'INFO {"max_payload": "1048576"}\r\nPONG\r\n',
    ],
)
async def test_what_is_no_server_of_nats_is_tried_again_and_ends_nothing(
    greeting: bytes, nats: NatsServer
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            writer.write(greeting)
            await writer.drain()
            await reader.read()  # until it is given up
            writer.close()
            await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        (good,) = nats.config.servers
        port = listening.sockets[0].getsockname()[1]
        async with Trial(replace(nats.config, servers=(replace(good, port=port),))) as trial:
            await trial.lines.until("cluster not connected")
            await until(lambda: trial.pauses >= 3)
            assert not trial.connection.is_connected
    assert "no server of NATS" in trial.lines.entries("cluster not connected")[0]["reason"]


async def test_a_bug_in_what_uses_the_connection_is_seen_and_has_it_made_again(nats: NatsServer) -> None:
    trial, runs = Trial(nats.config), 0

    async def fails(_client: Client) -> None:
        nonlocal runs
        runs += 1
        raise ValueError("not JSON")

    trial.connection.during(fails)
    async with trial:
        failed = await trial.lines.until("cluster connection failed")
        await until(lambda: runs >= 3)
    assert "not JSON" in failed["exception"]
    assert trial.pauses >= 2  # one after each


async def test_a_server_whose_check_meets_a_bug_is_not_moved_to(nats: NatsServer) -> None:
    (good,) = nats.config.servers
    trial = Trial(replace(nats.config, servers=(good, replace(good, host="localhost"))))

    async def fails(_client: Client) -> None:
        raise ValueError("not JSON")

    async with trial:
        await trial.lines.until("cluster connected")
        assert not await trial.connection.move(fails, "of no use")
        assert "not JSON" in trial.lines.entries("cluster connection failed")[0]["exception"]
        assert trial.connection.is_connected


def configured(file: Path, *, tls: bool = False, root: Path | None = None) -> ClusterConfig:
    return ClusterConfig((ClusterServer("127.0.0.1", 4222, tls=tls),), file, root, "main", "edge_main")


def test_a_seed_is_a_secret_of_its_own_and_needs_no_tls_on_this_machine(tmp_path: Path) -> None:
    seed, _ = new_nkey(os.urandom)
    write_atomic(file := tmp_path / "seed", seed + "\n", PRIVATE)
    credentials = read_credentials(configured(file))
    assert (credentials.seed, credentials.tls) == (seed, None)
    assert seed not in repr(credentials)
    assert read_credentials(configured(file, tls=True)).tls is not None


@pytest.mark.parametrize("text", ["", "SU", "SUAAAAAAAAAA", "U" * 58, "no seed at all"])
def test_what_is_no_seed_is_refused_without_a_byte_of_it(tmp_path: Path, text: str) -> None:
    write_atomic(file := tmp_path / "seed", text, PRIVATE)
    with pytest.raises(CredentialsError) as refused:
        read_credentials(configured(file))
    assert text == "" or text not in str(refused.value).removeprefix(str(file))


def test_credentials_that_others_can_read_are_not_used(tmp_path: Path) -> None:
    seed, _ = new_nkey(os.urandom)
    write_atomic(file := tmp_path / "seed", seed, PUBLIC)
    with pytest.raises(
        CredentialsError, match=f"^--cluster-credentials: .*chmod 600 {re.escape(str(file))}$"
    ):
        read_credentials(configured(file))


def test_a_certificate_without_its_key_is_refused_with_the_option(tmp_path: Path) -> None:
    server = TlsNatsServer(tmp_path)
    write_atomic(file := tmp_path / "alone.pem", server.root.read_text("ascii"), PRIVATE)
    with pytest.raises(
        CredentialsError, match=r"^--cluster-credentials: .*are not a certificate and its key"
    ):
        read_credentials(configured(file))


def test_a_certificate_with_its_key_is_shown_over_tls(tmp_path: Path) -> None:
    server = TlsNatsServer(tmp_path)
    credentials = read_credentials(configured(server.credentials, root=server.root))
    assert credentials.seed is None
    assert credentials.tls is not None


def test_a_root_that_holds_no_certificate_is_refused(tmp_path: Path) -> None:
    server = TlsNatsServer(tmp_path)
    write_atomic(root := tmp_path / "nothing.pem", "nothing")
    with pytest.raises(
        CredentialsError, match=f"^--cluster-root: {re.escape(str(root))} holds no certificate"
    ):
        read_credentials(configured(server.credentials, root=root))
