from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.registry import SchemaRegistry
from tests.fakes.followed import Followed
from tests.fakes.hub import Hub
from tests.fakes.view_stage import ViewStage, unclamped_registry


@pytest.fixture(scope="session")
def unclamped(tmp_path_factory: pytest.TempPathFactory) -> SchemaRegistry:
    return unclamped_registry(tmp_path_factory.mktemp("schemas"))


@pytest.fixture
def stage(hub: Hub) -> ViewStage:
    return ViewStage(hub)


@pytest.fixture
def followed(tmp_path: Path, registry: SchemaRegistry) -> Followed:
    return Followed(tmp_path, registry)


@pytest.fixture
def any_class(tmp_path: Path, unclamped: SchemaRegistry) -> Iterator[ViewStage]:
    """A relay whose nodes may announce an echo of any safety class."""
    hub = Hub(tmp_path, unclamped)
    yield ViewStage(hub)
    hub.close()
