"""``python -P -m kubelet.daemon PLAN``: the daemon, without the command line's library.

``kubelet run`` checks the options and then becomes this process. Must not import the library that parses
options: with what it needs it would stay in the memory of every board for as long as the daemon runs, and is
a fifth of it.
"""

import faulthandler
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


class LazyImports:
    """A finder for ``sys.meta_path`` that postpones the loading of ``names``.

    The standard library's ``LazyLoader`` postpones a module that one library imports: a second import loads
    it. Must not be given a module whose loading changes others.

    It can postpone what is imported by ``import module``. ``from module import name`` loads it, unless its
    part in C has the name; ``parts`` are these parts, by the modules' names.
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
    """Leaves a module unloaded; ``usual`` is what will load it, and ``part`` the module in C below it."""

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
        if name == "__path__" and spec.submodule_search_locations is None:
            raise AttributeError(name)  # an import by name asks for it, and only a package has it
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


_UNUSED = (
    "importlib.metadata",  # websockets, which needs it while its version is not a release
    "structlog.stdlib",  # structlog
    "structlog.threadlocal",  # structlog
    "locale",  # subprocess, for output that is text
    "shutil",  # tempfile, for directories
    "calendar",  # email
    "email.base64mime",  # email, for bodies of messages
    "email.errors",  # email
    "email.quoprimime",  # email, as above
    "glob",  # psutil, for sensors
    "inspect",  # asyncio and dataclasses; with the parser of Python
    "jsonschema_rs.canonical",  # jsonschema_rs
    "stringprep",  # encodings.idna, for host names beyond ASCII
    "structlog.twisted",  # structlog
    "textwrap",  # traceback, for what it prints by itself
    "tokenize",  # linecache, for the lines of a traceback
    "urllib.request",  # paho and websockets, for proxies; with the client of HTTP
    "uuid",  # paho, and for the tools of callers
)
"""What libraries import and a running node does not use, and by which of them it is imported."""
_UNUSED_BUT_A_PART = {"pickle": "_pickle"}  # structlog, for one exception
"""The same, and the module in C that has what is imported from it by name."""


def main() -> None:
    """Run the daemon by the plan in the first argument."""
    # The watchdog ends a process that hangs by SIGABRT: it then prints the stack of each thread.
    faulthandler.enable()
    _do_without(sys.modules, "rich", "bz2", "lzma")
    sys.meta_path.insert(0, LazyImports(*_UNUSED, parts=_UNUSED_BUT_A_PART))
    # After that: each of them loads what would load those.
    from kubelet.config import DaemonPlan  # noqa: PLC0415
    from kubelet.daemon.composition import run_daemon  # noqa: PLC0415
    from kubelet.process import fail, run_until_signal  # noqa: PLC0415
    from schemas.process.command_errors import errors_in_one_line  # noqa: PLC0415

    with errors_in_one_line(fail):
        plan = DaemonPlan.from_json(sys.argv[1])
        run_until_signal(run_daemon(plan, sys.stderr))


def _do_without(modules: dict[str, ModuleType], *names: str) -> None:
    """Make ``names`` look as if they were not installed.

    structlog loads rich where it can, for tracebacks in colour, which a daemon never prints: four mebibytes.
    shutil loads bz2 and lzma where it can, for archives, which a daemon never opens: a third of one.
    """
    for name in names:
        modules[name] = None  # type: ignore[assignment]  # how Python writes "not to be imported"


if __name__ == "__main__":
    main()
