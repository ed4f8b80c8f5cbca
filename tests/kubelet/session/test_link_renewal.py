"""How a node asks for a leaf over its session, and goes on with it."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kubelet.process import ticks_ms
from kubelet.session.link import LinkState
from kubelet.session.renewal import Renewal
from schemas.canonical import jcs
from schemas.certificates import make_csr
from schemas.identity import first_certificate_in, kid_of
from schemas.identity_files import IdentityFiles
from schemas.registry import SchemaRegistry
from schemas.tokens import DEVICE_REF, TokenVerifier
from tests.fakes.frames import message_id
from tests.fakes.node import announce_again, write_identity
from tests.fakes.node_link import BOUND_S, Rig
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, SimulatedCa

pytestmark = pytest.mark.integration


class Renewing:
    """What a node does with the leaf that it is given, played by a test.

    Attributes:
        due: whether it is time to ask.
    """

    def __init__(self, rig: Rig, files: IdentityFiles) -> None:
        self.due = True
        self.installed: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.renewed = asyncio.Event()
        self._files = files
        renewal = Renewal(
            rig.link.identity, files, self._install, self.renewed.set, self._now_ms, ticks_ms, rig.link.log
        )
        rig.link = replace(rig.link, renewal=renewal)

    def _now_ms(self) -> int:
        return int(NOW_MS) + (80 * DAY_MS if self.due else 0)

    async def _install(self, payload: Mapping[str, Any]) -> str | None:
        await self.installed.put(payload)
        await self.may_end.wait()
        self._files.install(payload["certificate"], payload["roots"])
        return None


@pytest.fixture
def renewing(rig: Rig, tmp_path: Path) -> Renewing:
    files = write_identity(tmp_path / "state", rig.node)
    files.csr.write_text(make_csr(rig.node.key, NODE_ID))
    return Renewing(rig, files)


def new_leaf(rig: Rig, ca: SimulatedCa) -> dict[str, Any]:
    """Return the payload that brings the node another leaf."""
    return {"ok": True, "certificate": ca.issue(key=rig.node.key).leaf_pem, "roots": ca.root_pem}


async def test_a_leaf_that_is_due_is_asked_for_once_the_manifest_is_accepted(
    rig: Rig, renewing: Renewing, ca: SimulatedCa
) -> None:
    async with rig.running():
        end = await rig.relay.next()
        await end.admit()
        await end.receive("announce")
        announce = await end.receive("heartbeat")
        command = await end.send("cmd")
        assert (await end.receive()).in_reply_to == command  # nothing was asked before
        await end.send("heartbeat_ack", answers=announce.msg_id)
        asked = await end.receive("renew")
        assert asked.payload == {"csr": make_csr(rig.node.key, NODE_ID)}  # the relay speaks 1.0
        answer = new_leaf(rig, ca)
        await end.send_payload("renew_ack", answer, answers=asked.msg_id)
        await asyncio.wait_for(renewing.renewed.wait(), BOUND_S)
        assert renewing.installed.get_nowait() == answer
        assert rig.link.identity.leaf_pem == answer["certificate"]
        assert rig.link.state is LinkState.OPEN


async def test_a_node_asks_when_its_manifest_is_acknowledged_too(rig: Rig, renewing: Renewing) -> None:
    assert renewing.due
    async with rig.running():
        end = await rig.opened()
        await end.receive("renew")


async def test_a_leaf_that_is_not_due_is_not_asked_for(rig: Rig, renewing: Renewing) -> None:
    renewing.due = False
    async with rig.running():
        end = await rig.opened()
        msg_id = await end.send("cmd")
        assert (await end.receive()).in_reply_to == msg_id
        renewing.due = True
        announce_again(rig.link.announcer)
        await end.accept()
        await end.receive("renew")


async def test_commands_go_on_while_a_leaf_is_put_in_place(
    rig: Rig, renewing: Renewing, ca: SimulatedCa
) -> None:
    renewing.may_end.clear()
    async with rig.running():
        end = await rig.opened()
        asked = await end.receive("renew")
        await end.send_payload("renew_ack", new_leaf(rig, ca), answers=asked.msg_id)
        await asyncio.wait_for(renewing.installed.get(), BOUND_S)
        assert (await end.command()).payload["ok"] is True
        assert not renewing.renewed.is_set()
        renewing.may_end.set()
        await asyncio.wait_for(renewing.renewed.wait(), BOUND_S)


async def test_a_leaf_that_was_not_asked_for_is_dropped(rig: Rig, ca: SimulatedCa) -> None:
    async with rig.running():
        end = await rig.opened()
        frame = {"type": "renew_ack", "msg_id": message_id(1), "in_reply_to": message_id(2)}
        await end.socket.send(jcs({**frame, "payload": new_leaf(rig, ca)}).decode())
        assert (await end.command()).payload["ok"] is True
        assert rig.link.identity.leaf_pem == rig.node.leaf_pem


async def test_after_a_renewal_the_next_session_is_opened_with_the_new_leaf(
    rig: Rig, renewing: Renewing, ca: SimulatedCa
) -> None:
    async with rig.running():
        end = await rig.opened()
        asked = await end.receive("renew")
        answer = new_leaf(rig, ca)
        await end.send_payload("renew_ack", answer, answers=asked.msg_id)
        await asyncio.wait_for(renewing.renewed.wait(), BOUND_S)
        end.drop()
        (await rig.waits.next()).end()
        auth = await (await rig.relay.next()).admit()
    assert auth.payload["certificate"] == answer["certificate"] + rig.node.leaf_pem + ca.root_pem
    kid = kid_of(first_certificate_in(answer["certificate"]))
    verifier = TokenVerifier(SchemaRegistry(), DEVICE_REF)
    keys = {kid: rig.node.public_key}
    verifier.verify(
        auth.payload["token"], keys.get, audiences=frozenset({rig.relay.url}), now_s=NOW_MS // 1000
    )
