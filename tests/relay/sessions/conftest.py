"""The nodes' endpoint of one relay."""

import pytest

from schemas.frames import FrameReader
from tests.fakes.hub import Hub
from tests.fakes.serving import Server
from tests.fakes.session_stage import Stage


@pytest.fixture
def stage(hub: Hub, reader: FrameReader, server: Server) -> Stage:
    return Stage(hub, hub.sessions(), reader, server)
