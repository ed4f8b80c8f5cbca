import sys
from importlib import import_module
from pathlib import Path

import pytest

from kubelet.daemon.lazy_imports import LazyImports


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


def test_others_are_loaded_at_once() -> None:
    import_module("other_module")
    assert is_loaded("other_module")


def test_a_module_that_is_not_there_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("absent_module")
