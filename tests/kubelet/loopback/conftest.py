import pytest

from tests.fakes.loopback_state import LoopbackState


@pytest.fixture
def state() -> LoopbackState:
    return LoopbackState()
