"""Modules that libraries import and a running node does not use: each is loaded when it is first used.

Must not be given a module that several threads may use first: one can see what another has half loaded.
"""

from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType


class LazyImports:
    """A finder for ``sys.meta_path`` that postpones the loading of ``names``.

    It can postpone only what one library alone imports, by ``import module``: a second import of the module
    loads it, and so does ``from module import name``.
    """

    def __init__(self, *names: str) -> None:
        self._names = frozenset(names)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load ``name`` lazily; None leaves it to the finders after this one."""
        if name not in self._names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec
