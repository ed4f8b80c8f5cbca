from relay.streams.caller_tools.limits import Full, Holder, SharedBudget


def holder(sub: str = "ant", tenant: str = "acme", node: str = "a") -> Holder:
    return Holder(("https://relay.example", tenant, sub), node)


def filled(budget: SharedBudget, sub: str, tenant: str = "acme") -> tuple[int, Full]:
    """Take all that the principal can have, one byte after another; return how much, and what ended it."""
    taken = 0
    while (full := budget.take(holder(sub, tenant, f"{tenant}-{sub}"), 1)) is None:
        taken += 1
    return taken, full


def test_a_node_cannot_take_what_is_for_all() -> None:
    budget = SharedBudget(per_node=10, in_all=1000)
    assert budget.take(holder(), 10) is None
    assert budget.take(holder("bee"), 1) is Full.NODE
    assert budget.take(holder(node="b"), 1) is None
    assert budget.total == 11


def test_who_comes_later_finds_room_whatever_one_principal_has_taken() -> None:
    budget = SharedBudget(per_node=1000, in_all=1000)
    alone, full = filled(budget, "ant")
    assert (alone, full) == (250, Full.PRINCIPAL)
    second, full = filled(budget, "bee")
    assert (second, full) == (125, Full.PRINCIPAL)
    other, full = filled(budget, "ant", "globex")
    assert other > second
    assert full is Full.PRINCIPAL
    # Whole tenants: what one has taken with all its principals leaves more than that to the next.
    for number in range(50):
        filled(budget, f"bee-{number}")
    assert budget.take(holder("last"), 100) is Full.TENANT
    assert filled(budget, "ant", "initech")[0] > 50


def test_what_is_given_back_can_be_taken_again() -> None:
    budget = SharedBudget(per_node=10, in_all=40)
    assert budget.take(holder(), 10) is None
    budget.give_back(holder(), 4)
    assert budget.take(holder(), 5) is Full.NODE
    assert budget.take(holder(), 4) is None
    budget.give_back(holder(), 10)
    assert budget.total == 0
    assert budget.take(holder("bee"), 10) is None
