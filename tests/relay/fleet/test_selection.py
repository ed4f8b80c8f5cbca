from collections.abc import Sequence

import pytest

from relay.fleet.node_names import NodeNames, UnknownNodeError
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.state.names import NodeName

ACME, GLOBEX = "acme", "globex"
GREEN, BARN, BARE, FOREIGN = (f"01hzx9k3m4p7q8r9s0t1v2w3x{last}" for last in "abcd")


class Known:
    """Three nodes of one tenant, and one of another."""

    def ids_of(self, tenant: str) -> Sequence[str]:
        return [GREEN, BARN, BARE] if tenant == ACME else [FOREIGN]

    def tenant_of(self, node_id: str) -> str | None:
        return GLOBEX if node_id == FOREIGN else ACME


@pytest.fixture(scope="module")
def names() -> NodeNames:
    names = NodeNames(Known())
    names.change(
        {
            GREEN: NodeName(ACME, "greenhouse", ("gateway", "site=north")),
            BARN: NodeName(ACME, "barn", ("site=south",)),
            FOREIGN: NodeName(GLOBEX, "vault", ("secret",)),
        }
    )
    return names


@pytest.mark.parametrize(
    ("selection", "selected"),
    [
        pytest.param(WHOLE_FLEET, {GREEN, BARN, BARE}, id="all"),
        pytest.param(Selection(kinds=frozenset({"sys"})), {GREEN, BARN, BARE}, id="kinds are not nodes"),
        pytest.param(Selection(nodes=("Greenhouse", BARE)), {GREEN, BARE}, id="nodes"),
        pytest.param(Selection(tags=("site=south", "site=north")), {GREEN, BARN}, id="one value of a key"),
        pytest.param(Selection(tags=("site=south", "gateway")), set(), id="a value of each key"),
        pytest.param(Selection(tags=("site=north", "gateway")), {GREEN}, id="both tags"),
        pytest.param(Selection(nodes=("barn",), tags=("gateway",)), set(), id="both"),
        pytest.param(Selection(nodes=(GREEN, "barn"), tags=("gateway",)), {GREEN}, id="both, of two"),
    ],
)
def test_a_node_is_selected_by_its_names_and_its_tags(
    names: NodeNames, selection: Selection, selected: set[str]
) -> None:
    everyone = {GREEN, BARN, BARE}
    assert {node_id for node_id in everyone if selection.admits_node(names, ACME, node_id)} == selected
    node_ids = selection.node_ids(names, ACME)
    assert (everyone if node_ids is None else node_ids) == selected


@pytest.mark.parametrize(
    "selection",
    [
        pytest.param(Selection(nodes=("nowhere",)), id="no such label"),
        pytest.param(Selection(nodes=("vault",)), id="another tenant's label"),
        pytest.param(Selection(nodes=(FOREIGN,)), id="another tenant's node"),
        pytest.param(Selection(tags=("nothing",)), id="no such tag"),
        pytest.param(Selection(tags=("secret",)), id="another tenant's tag"),
    ],
)
def test_what_fits_no_node_selects_none_and_is_an_error_where_it_is_listed(
    names: NodeNames, selection: Selection
) -> None:
    assert not any(selection.admits_node(names, ACME, node_id) for node_id in (GREEN, BARN, BARE))
    with pytest.raises(UnknownNodeError) as caught:
        selection.node_ids(names, ACME)
    assert caught.value.close == ()


def test_kinds_are_all_unless_some_are_named() -> None:
    assert WHOLE_FLEET.admits_kind("sys")
    assert Selection(kinds=frozenset({"sys"})).admits_kind("sys")
    assert not Selection(kinds=frozenset({"sys"})).admits_kind("sysecho")
