"""A CA in a directory of the test's own, and what enrols nodes."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from relay.pki.authority import CertificateAuthority
from tests.fakes.clock import FakeClock
from tests.fakes.enrolling import Stage
from tests.fakes.hub import Hub
from tests.fakes.real_ca import authority
from tests.fakes.signer import DAY_MS, NOW_MS


@pytest_asyncio.fixture(loop_scope="module")
async def stage(hub: Hub, tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(hub, tmp_path)
    async with stage.http:
        yield stage


@pytest.fixture
def ca(tmp_path: Path, clock: FakeClock) -> CertificateAuthority:
    ca = authority(tmp_path / "ca", clock)
    ca.create()
    return ca


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW_MS)


@pytest.fixture
def rotated(tmp_path: Path, clock: FakeClock) -> tuple[CertificateAuthority, str]:
    """An authority whose root was rotated, and the root that it had before."""
    ca = authority(tmp_path / "rotated", clock)
    ca.create()
    old = ca.root_pem()
    assert ca.rotate_root(90) == NOW_MS + 90 * DAY_MS
    return ca, old
