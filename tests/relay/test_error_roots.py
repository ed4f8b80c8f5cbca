"""Whose fault each error of the relay is: every type has one of the roots."""

import importlib
import pkgutil

import relay
from schemas.error_roots import EdgeError
from schemas.faults import FailedError


def errors_of_the_relay() -> set[type[Exception]]:
    found = pkgutil.walk_packages(relay.__path__, "relay.")
    modules = [importlib.import_module(module.name) for module in found if "__main__" not in module.name]
    return {
        item
        for module in modules
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, Exception) and item.__module__ == module.__name__
    }


def test_every_error_of_the_relay_has_a_root() -> None:
    errors = errors_of_the_relay()
    assert errors
    assert {error for error in errors if not issubclass(error, (EdgeError, FailedError))} == set()


def test_no_error_of_the_relay_is_caught_with_pythons_value_errors() -> None:
    assert {
        error for error in errors_of_the_relay() if issubclass(error, (ValueError, RuntimeError))
    } == set()
