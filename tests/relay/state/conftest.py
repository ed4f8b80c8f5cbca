"""A relay that watches its CA and its other ledgers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.pki.authority import CertificateAuthority
from schemas.frames import FrameReader
from tests.fakes.clock import FakeClock
from tests.fakes.hub import Hub
from tests.fakes.real_ca import created
from tests.fakes.serving import Server
from tests.fakes.signer import NOW_MS
from tests.fakes.watched_relay import Stage


@pytest.fixture
def stage(hub: Hub, tmp_path: Path, server: Server, reader: FrameReader) -> Iterator[Stage]:
    stage = Stage(hub, tmp_path, server, reader)
    stage.watch.begin()
    yield stage
    stage.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW_MS)


@pytest.fixture
def ca(tmp_path: Path, clock: FakeClock) -> CertificateAuthority:
    return created(tmp_path / "ca", clock)
