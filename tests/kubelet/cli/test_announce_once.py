import io
import json
from pathlib import Path

import pytest

from kubelet.cli.announce_once import publish_once, sign_once
from kubelet.daemon.composition import last_issued_file, make_handlers
from kubelet.identity.verification import verify_manifest
from relay.settings.environment import now_ms
from schemas.addresses import BrokerAddress
from schemas.manifest import etag_of
from schemas.process.logs import make_logger
from tests.fakes.lines import LogLines
from tests.fakes.mqtt_listener import MqttListener
from tests.fakes.node import identity_of
from tests.fakes.signer import SimulatedNode

TTL_MS = 60_000


def test_what_is_signed_by_hand_is_what_the_daemon_would_announce(
    node_of_today: SimulatedNode, tmp_path: Path
) -> None:
    before = now_ms()
    manifest = sign_once(identity_of(node_of_today), tmp_path, TTL_MS, io.StringIO(), remember=False)
    after = now_ms()
    finding = verify_manifest(manifest.wire, node_of_today.leaf_pem, node_of_today.root_pem, after)
    assert finding.reason is None
    assert finding.manifest is not None
    announced = [
        handler.capability
        for handler in make_handlers(node_of_today.node_id, make_logger("kubelet", io.StringIO()))
    ]
    assert json.loads(finding.manifest.wire)["capabilities"] == announced
    assert before <= manifest.issued_at_ms <= after
    assert manifest.expires_at_ms == manifest.issued_at_ms + TTL_MS


@pytest.mark.parametrize("remember", [True, False])
def test_only_what_is_published_is_remembered(
    node_of_today: SimulatedNode, tmp_path: Path, *, remember: bool
) -> None:
    future = now_ms() + 3_600_000
    last_issued_file(tmp_path).write_text(f"{future}\n")
    manifest = sign_once(identity_of(node_of_today), tmp_path, TTL_MS, io.StringIO(), remember=remember)
    assert (manifest.issued_at_ms == future + 1) is remember
    assert last_issued_file(tmp_path).read_text() == f"{future + remember}\n"


async def test_identity_and_manifest_are_put_on_the_broker_to_stay(
    node_of_today: SimulatedNode, broker: BrokerAddress, tmp_path: Path, log: LogLines
) -> None:
    identity = identity_of(node_of_today)
    manifest = sign_once(identity, tmp_path, TTL_MS, log, remember=True)
    assert await publish_once(identity, manifest, broker, log) is True
    async with MqttListener(broker, f"$devices/{identity.node_id}/+").listening() as listener:
        messages = {message.topic.rpartition("/")[2]: message for message in
                    [await listener.next(), await listener.next()]}  # fmt: skip
    assert all(message.retained for message in messages.values())
    assert messages["identity"].payload.decode() == identity.chain_pem
    assert etag_of(messages["announce"].payload) == manifest.etag
