"""A link to a relay that the test plays, and what they share."""

from collections.abc import AsyncIterator

import pytest

from schemas.frames import FrameReader
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.node_link import Rig, World
from tests.fakes.played_relay import PlayedRelay
from tests.fakes.signer import SimulatedNode


@pytest.fixture
def world(  # noqa: PLR0913, PLR0917 - the fixtures that it bundles
    node: SimulatedNode,
    registry: SchemaRegistry,
    kinds: KindRegistry,
    reader: FrameReader,
    clock: FakeClock,
    log: LogLines,
) -> World:
    return World(node, registry, kinds, reader, clock, log)


@pytest.fixture
def rig(world: World, relay: PlayedRelay) -> Rig:
    return world.rig(relay)


@pytest.fixture
async def second(relay: PlayedRelay, reader: FrameReader) -> AsyncIterator[PlayedRelay]:
    async with PlayedRelay(reader).running() as second:
        second.audience = relay.url
        yield second
