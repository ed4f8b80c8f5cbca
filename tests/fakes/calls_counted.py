"""Counts the calls of a function, which runs as it is."""

from types import ModuleType
from typing import Any

import pytest


class Calls:
    """The calls of ``module.name`` since it was made, until ``patch`` is undone.

    Attributes:
        count: how many.
    """

    def __init__(self, patch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
        self.count = 0
        function = getattr(module, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return function(*arguments, **options)

        patch.setattr(module, name, counted)
