"""An enrolled node at the broker that the relay runs tries what only other nodes or the relay may do.

Tried: publish as another node, by a message and by a will; read what others announce; connect without a
certificate, and by NATS' own protocol, which has no TLS; have the broker retain as much as it likes.
Expected: nothing of it reaches the relay, nothing is read, the node's own messages still arrive, and the
store has room.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from schemas import topics
from schemas.manifest import MAX_MANIFEST_BYTES
from schemas.tls import client_context
from tests.fakes.polling import BOUND_S, before_asking_again
from tests.fakes.small_fleet import SmallFleet, small_fleet
from tests.fakes.tls_broker import Peer

pytestmark = pytest.mark.long

NATS_CONNECT = b'CONNECT {"verbose":true,"user":"CN=edge-relay"}\r\nSUB $devices.> 1\r\nPING\r\n'


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[SmallFleet]:
    async with small_fleet(tmp_path, secure=True) as fleet:
        await fleet.start_relay(*fleet.listening)
        yield fleet


async def test_a_node_writes_below_its_own_topic_alone_and_reads_nothing(fleet: SmallFleet) -> None:
    mallory, victim = await fleet.enrol("mallory"), await fleet.enrol("victim")
    await asyncio.to_thread(_try_everything, fleet, mallory["node_id"], victim["node_id"])


def _try_everything(fleet: SmallFleet, own_id: str, other_id: str) -> None:
    own = fleet.state.broker_client_tls
    root = (fleet.state.ca / "server-root.pem").read_text("ascii")
    reader = Peer(fleet.broker, client_context(root, (own.certificate, own.key)))
    assert reader.subscribe("$devices/+/announce", "$devices/+/identity")
    # The broker has read the new users when the node is admitted.
    mallory = fleet.admitted("mallory")
    for retain in (True, False):
        mallory.try_publish(f"$devices/{other_id}/announce", b"forged", retain=retain)
        mallory.try_publish(f"$devices/{other_id}/identity", b"", retain=retain)
    for topic in (f"$devices/{other_id}/announce", f"$devices/{own_id}/announce", "$devices/#", "#"):
        assert not mallory.subscribe(topic)
    dying = fleet.peer("mallory", will=f"$devices/{other_id}/announce")
    dying.vanish()
    mallory.publish(f"$devices/{own_id}/announce", b"its own")
    # Of all of that, its own message is the first and only one to arrive.
    assert reader.next() == (f"$devices/{own_id}/announce", b"its own")
    assert reader.messages.empty()
    assert mallory.messages.empty()
    mallory.close()
    reader.close()


async def test_a_node_retains_its_four_topics_and_no_more(fleet: SmallFleet) -> None:
    own_id = (await fleet.enrol("mallory"))["node_id"]
    await asyncio.to_thread(_fill, fleet, own_id)
    async with asyncio.timeout(BOUND_S):
        # The relay measures when it has set the limits of the store.
        while not (filled := await fleet.metric("edge_relay_broker_store_filled_ratio")):
            await before_asking_again()
    assert filled < 0.002
    assert not fleet.log("the broker's store has no limits")


def _fill(fleet: SmallFleet, own_id: str) -> None:
    mallory = fleet.admitted("mallory")
    for number in range(20):
        mallory.try_publish(f"$devices/{own_id}/{number}", bytes(MAX_MANIFEST_BYTES), retain=True)
        mallory.try_publish(f"$devices/{own_id}/announce/{number}", bytes(MAX_MANIFEST_BYTES), retain=True)
    for topic in topics.written_by(own_id):
        mallory.publish(topic, bytes(MAX_MANIFEST_BYTES))
    mallory.close()


async def test_without_a_certificate_there_is_no_way_in(fleet: SmallFleet) -> None:
    stranger = await asyncio.to_thread(fleet.peer, None, username="CN=edge-relay")
    assert not stranger.connected
    stranger.close()
    listening = [
        connection.laddr[1]
        for connection in psutil.Process(fleet.broker_pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    own_protocol = [port for port in listening if port != fleet.broker_port]
    assert len(own_protocol) == 1
    reader, writer = await asyncio.open_connection("127.0.0.1", own_protocol[0])
    assert json.loads((await reader.readline()).removeprefix(b"INFO "))["auth_required"] is True
    writer.write(NATS_CONNECT)
    assert b"Authorization Violation" in await reader.read()
    writer.close()
