import pytest

from tests.fakes.caller_stage import CallerStage
from tests.fakes.hub import Hub


@pytest.fixture
def stage(hub: Hub) -> CallerStage:
    return CallerStage(hub)
