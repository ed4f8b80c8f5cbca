import pytest

from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from schemas.trust import TrustRules


@pytest.fixture(scope="session")
def registry() -> SchemaRegistry:
    return SchemaRegistry()


@pytest.fixture(scope="session")
def kinds() -> KindRegistry:
    return KindRegistry()


@pytest.fixture
def rules(registry: SchemaRegistry, kinds: KindRegistry) -> TrustRules:
    return TrustRules(registry, kinds)
