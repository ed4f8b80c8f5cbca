import pytest

from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry


@pytest.fixture(scope="session")
def registry() -> SchemaRegistry:
    return SchemaRegistry()


@pytest.fixture(scope="session")
def kinds() -> KindRegistry:
    return KindRegistry()
