from relay.caller_tools.memory_budget import MemoryBudget


def test_a_node_cannot_take_what_is_for_all() -> None:
    budget = MemoryBudget(per_node=10, in_all=15)
    assert budget.take("a", 10)
    assert not budget.take("a", 1)
    assert budget.take("b", 5)
    assert not budget.take("b", 1)
    assert budget.total == 15


def test_what_is_given_back_can_be_taken_again() -> None:
    budget = MemoryBudget(per_node=10, in_all=10)
    assert budget.take("a", 10)
    budget.give_back("a", 4)
    assert not budget.take("a", 5)
    assert budget.take("a", 4)
    budget.give_back("a", 10)
    assert budget.total == 0
    assert budget.take("b", 10)
