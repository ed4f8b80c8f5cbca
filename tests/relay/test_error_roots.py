"""Whose fault each error of the relay is: every type has one of the roots."""

import relay
from schemas.error_roots import EdgeError
from tests.fakes.error_types import errors_of


def test_every_error_of_the_relay_has_a_root() -> None:
    errors = errors_of(relay)
    assert errors
    assert {error for error in errors if not issubclass(error, EdgeError)} == set()


def test_no_error_of_the_relay_is_caught_with_pythons_value_errors() -> None:
    assert {error for error in errors_of(relay) if issubclass(error, (ValueError, RuntimeError))} == set()
