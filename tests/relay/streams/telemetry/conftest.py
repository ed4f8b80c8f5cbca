"""Streams over nodes that a test plays."""

from pathlib import Path

import pytest

from schemas.registry import SchemaRegistry
from tests.fakes.followed import Followed


@pytest.fixture
def followed(tmp_path: Path, registry: SchemaRegistry) -> Followed:
    return Followed(tmp_path, registry)
