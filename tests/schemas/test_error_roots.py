import importlib
import pkgutil

import pytest

import schemas
from schemas.error_roots import EdgeError, OperatorError, PeerError
from schemas.errors import Failure, ToolError
from schemas.session import PeerProtocolError, ProtocolError


@pytest.mark.parametrize("error", [OperatorError("x"), PeerError("x"), ToolError(Failure.INTERNAL)])
def test_every_expected_error_has_one_root(error: Exception) -> None:
    assert isinstance(error, EdgeError)


def test_whose_fault_it_is_cannot_be_mistaken() -> None:
    kinds = (OperatorError, PeerError, ToolError)
    assert [(a, b) for a in kinds for b in kinds if a is not b and issubclass(a, b)] == []


def errors_of_the_contract() -> list[type[Exception]]:
    modules = [
        importlib.import_module(f"schemas.{module.name}") for module in pkgutil.iter_modules(schemas.__path__)
    ]
    return [
        item
        for module in modules
        for name, item in vars(module).items()
        if isinstance(item, type)
        and issubclass(item, Exception)
        and item.__module__ == module.__name__
        and not name.startswith("_")
    ]


def test_every_error_of_the_contract_has_the_root() -> None:
    assert [error for error in errors_of_the_contract() if not issubclass(error, EdgeError)] == []


def test_none_of_them_is_caught_as_a_value_error() -> None:
    assert [error for error in errors_of_the_contract() if issubclass(error, ValueError)] == []


def test_a_frame_of_our_own_that_does_not_fit_is_not_blamed_on_the_other_end() -> None:
    assert issubclass(PeerProtocolError, PeerError)
    assert not issubclass(ProtocolError, PeerError)
