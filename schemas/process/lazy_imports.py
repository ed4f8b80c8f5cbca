"""Which modules of others a process does without, although a library that it uses imports them.

What a library imports stays in the memory of the process, and of a library that is used in part most is never
used. A module is made to look absent where the library goes on without it; else its loading is postponed
until it is used. Must not know a library: each program names its own, and which library imports them.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from threading import RLock
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader


def do_without(*names: str) -> None:
    """Make the modules ``names`` look as if they were not installed. None of them is loaded yet."""
    for name in names:
        sys.modules[name] = None  # type: ignore[assignment]  # how Python writes "not to be imported"


class LazyImports:
    """A finder for ``sys.meta_path`` that postpones the loading of ``names``.

    The standard library's ``LazyLoader`` postpones a module that one library imports: a second import loads
    it. Must not be given a module whose loading changes others.

    It can postpone what is imported by ``import module``, and a package whose modules are imported.
    ``from module import name`` loads it, unless the part of it that defines the name, often one in C, has it;
    ``parts`` are these parts, by the modules' names.
    """

    def __init__(self, *names: str, parts: Mapping[str, str] = MappingProxyType({})) -> None:
        self._names = frozenset((*names, *parts))
        self._parts = parts

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load ``name`` lazily; None leaves it to the finders after this one."""
        if name not in self._names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PostponingLoader(spec.loader, self._parts.get(name))
        return spec


class _PostponingLoader(LazyLoader):
    """Leaves a module unloaded; ``usual`` is what will load it, and ``part`` the one with its names."""

    def __init__(self, usual: "Loader", part: str | None) -> None:
        super().__init__(usual)
        self.usual = usual
        self.part = part

    def exec_module(self, module: ModuleType) -> None:
        spec = _spec_of(module)
        spec.loader_state = RLock()
        module.__class__ = _PostponedModule


class _PostponedModule(ModuleType):
    """A module that is loaded when anything but its specification is read. Any thread may be the first."""

    def __getattribute__(self, name: str) -> Any:
        # Each further import reads it.
        if name == "__spec__":
            return ModuleType.__getattribute__(self, name)
        spec = _spec_of(self)
        if name == "__path__":  # an import by name asks for it, or of a module below: only a package has it
            if spec.submodule_search_locations is None:
                raise AttributeError(name)
            return spec.submodule_search_locations
        part = spec.loader.part if isinstance(spec.loader, _PostponingLoader) else None
        if part is not None and not name.startswith("_") and hasattr(known := import_module(part), name):
            return getattr(known, name)
        _load(self, spec)
        return ModuleType.__getattribute__(self, name)


def _load(module: ModuleType, spec: ModuleSpec) -> None:
    """Load ``module``, unless that is done, or this thread is doing it. Another thread waits."""
    with spec.loader_state:
        postponing = spec.loader
        if not isinstance(postponing, _PostponingLoader):
            return
        spec.loader = module.__loader__ = postponing.usual
        try:
            spec.loader.exec_module(module)
        except BaseException:
            spec.loader = postponing
            raise
        module.__class__ = ModuleType


def _spec_of(module: ModuleType) -> ModuleSpec:
    spec = ModuleType.__getattribute__(module, "__spec__")
    assert isinstance(spec, ModuleSpec)  # noqa: S101 - the import system has set it
    return spec
