import pytest

from schemas.error_roots import EdgeError, OperatorError, PeerError
from schemas.errors import Failure, ToolError


@pytest.mark.parametrize("error", [OperatorError("x"), PeerError("x"), ToolError(Failure.INTERNAL)])
def test_every_expected_error_has_one_root(error: Exception) -> None:
    assert isinstance(error, EdgeError)


def test_whose_fault_it_is_cannot_be_mistaken() -> None:
    kinds = (OperatorError, PeerError, ToolError)
    assert [(a, b) for a in kinds for b in kinds if a is not b and issubclass(a, b)] == []
