import pytest
from hypothesis import settings

from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry

# The same examples in every run, and no clock that decides whether a test passes.
settings.register_profile("reproducible", deadline=None, derandomize=True, database=None)
settings.load_profile("reproducible")


@pytest.fixture(scope="session")
def registry() -> SchemaRegistry:
    return SchemaRegistry()


@pytest.fixture(scope="session")
def kinds() -> KindRegistry:
    return KindRegistry()
