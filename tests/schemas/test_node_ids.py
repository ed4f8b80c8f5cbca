import pytest

from schemas.node_ids import new_node_id
from schemas.projection import is_node_id
from schemas.ulids import UlidSource
from tests.fakes.signer import NOW_MS


def test_a_node_id_is_a_ulid_in_lower_case() -> None:
    made = new_node_id(NOW_MS, bytes)
    assert is_node_id(made)
    assert made == UlidSource(lambda: NOW_MS, bytes).new().lower()


@pytest.mark.parametrize("now_ms", [-1, 2**48])
def test_a_time_that_a_ulid_cannot_hold_is_an_error(now_ms: int) -> None:
    with pytest.raises(OverflowError):
        new_node_id(now_ms, bytes)
