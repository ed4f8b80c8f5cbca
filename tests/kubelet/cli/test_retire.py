"""``kubelet retire`` at a relay that sends what relays send to every node, or has answered before."""

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kubelet.cli.retire import RetirementError, retire
from kubelet.config import NodeConfig
from schemas.frames import SUBPROTOCOLS, FrameReader
from schemas.identity_files import IdentityFiles
from schemas.session import CloseCode
from tests.fakes.node import write_identity
from tests.fakes.played_relay import PlayedRelay
from tests.fakes.signer import SimulatedNode

pytestmark = pytest.mark.integration


@pytest.fixture
async def relay(reader: FrameReader) -> AsyncIterator[PlayedRelay]:
    async with PlayedRelay(reader, SUBPROTOCOLS).running() as relay:
        yield relay


@pytest.fixture
def files(tmp_path: Path, node: SimulatedNode) -> IdentityFiles:
    return write_identity(tmp_path / "state", node)


async def retired(relay: PlayedRelay, files: IdentityFiles) -> None:
    async with asyncio.timeout(30):
        await retire(NodeConfig(None, relay.url), files.root, io.StringIO())


@pytest.mark.parametrize("first", ["telemetry_lease", "session_open", "cmd"])
async def test_what_comes_before_the_answer_is_passed_over(
    relay: PlayedRelay, files: IdentityFiles, first: str
) -> None:
    retiring = asyncio.create_task(retired(relay, files))
    end = await relay.next()
    await end.admit()
    await end.send(first)
    asked = await end.receive("retire")
    await end.send("retire_ack", answers=asked.msg_id)
    await retiring
    assert not files.exists()


@pytest.mark.parametrize("bye", [False, True], ids=["without a word", "after a bye"])
async def test_after_a_lost_answer_the_relay_says_that_the_node_is_revoked(
    relay: PlayedRelay,
    files: IdentityFiles,
    bye: bool,  # noqa: FBT001 - a case
) -> None:
    retiring = asyncio.create_task(retired(relay, files))
    end = await relay.next()
    await end.admit()
    await end.receive("retire")
    end.drop()
    with pytest.raises(RetirementError, match="try again"):
        await retiring
    assert files.exists()
    retiring = asyncio.create_task(retired(relay, files))
    end = await relay.next()
    await end.challenge()
    await end.receive()
    if bye:
        await end.send("bye", reason="revoked")
    await end.socket.close(CloseCode.REVOKED)
    await retiring
    assert not files.exists()
