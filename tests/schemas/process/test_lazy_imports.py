import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from schemas.process.lazy_imports import LazyImports

BOUND_S = 30


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two modules that can be imported, of which ``postponed_module`` is loaded when it is used."""
    (tmp_path / "postponed_module.py").write_text("VALUE = 7\n")
    (tmp_path / "other_module.py").write_text("import postponed_module\nVALUE = 8\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [LazyImports("postponed_module", "absent_module"), *sys.meta_path])
    for name in ("postponed_module", "other_module"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def is_loaded(name: str) -> bool:
    return "VALUE" in object.__getattribute__(sys.modules[name], "__dict__")


def test_a_module_is_loaded_when_it_is_used() -> None:
    module = import_module("postponed_module")
    assert not is_loaded("postponed_module")
    assert module.VALUE == 7
    assert is_loaded("postponed_module")


def test_a_library_that_imports_it_does_not_load_it() -> None:
    import_module("other_module")
    assert not is_loaded("postponed_module")


def test_a_second_library_that_imports_it_does_not_load_it_either() -> None:
    import_module("other_module")
    exec("import postponed_module", {})  # noqa: S102 - the statement, as a library has it
    assert not is_loaded("postponed_module")
    assert import_module("other_module").postponed_module.VALUE == 7
    assert is_loaded("postponed_module")


def test_a_name_that_is_imported_from_it_loads_it() -> None:
    names: dict[str, object] = {}
    exec("from postponed_module import VALUE", names)  # noqa: S102 - as above
    assert names["VALUE"] == 7


def test_a_module_of_a_postponed_package_does_not_load_the_package(tmp_path: Path) -> None:
    (tmp_path / "postponed_module").mkdir()
    (tmp_path / "postponed_module.py").rename(tmp_path / "postponed_module" / "__init__.py")
    (tmp_path / "postponed_module" / "below.py").write_text("VALUE = 9\n")
    assert import_module("postponed_module.below").VALUE == 9
    assert not is_loaded("postponed_module")
    assert import_module("postponed_module").VALUE == 7
    assert import_module("postponed_module").below.VALUE == 9


def test_a_name_of_its_part_in_c_does_not_load_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "part_module.py").write_text("PART = 6\n")
    (tmp_path / "postponed_module.py").write_text("from part_module import PART\nVALUE = 7\n")
    finder = LazyImports(parts={"postponed_module": "part_module"})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "part_module", raising=False)
    names: dict[str, object] = {}
    exec("from postponed_module import PART", names)  # noqa: S102 - as above
    assert names["PART"] == 6
    assert not is_loaded("postponed_module")
    exec("from postponed_module import VALUE", names)  # noqa: S102 - as above
    assert names["VALUE"] == 7
    assert is_loaded("postponed_module")


def test_once_loaded_it_is_a_module_as_any_other() -> None:
    module = import_module("postponed_module")
    assert module.VALUE == 7
    assert type(module) is ModuleType
    assert isinstance(module.__loader__, SourceFileLoader)
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__


def test_a_thread_waits_for_another_that_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "postponed_module.py").write_text(
        f"import stage\nstage.loading.set()\nstage.go_on.wait({BOUND_S})\nVALUE = 7\n"
    )
    loading, go_on = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "stage", SimpleNamespace(loading=loading, go_on=go_on))
    module = import_module("postponed_module")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: module.VALUE)
        assert loading.wait(BOUND_S)
        second = threads.submit(lambda: module.VALUE)
        go_on.set()
        assert (first.result(BOUND_S), second.result(BOUND_S)) == (7, 7)


def test_a_module_that_fails_to_load_fails_again(tmp_path: Path) -> None:
    (tmp_path / "postponed_module.py").write_text("raise OSError('not now')\n")
    module = import_module("postponed_module")
    for _ in range(2):
        with pytest.raises(OSError, match="not now"):
            _ = module.VALUE
    assert type(module) is not ModuleType


def test_others_are_loaded_at_once() -> None:
    import_module("other_module")
    assert is_loaded("other_module")


def test_a_module_that_is_not_there_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("absent_module")
