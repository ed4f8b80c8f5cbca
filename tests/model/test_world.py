"""Delivery as a whole: hypothesis finds the shortest choices that violate a property, and walks go far."""

from contextlib import closing

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from schemas.frames import FrameReader
from schemas.registry import SchemaRegistry
from tests.fakes.examples import examples
from tests.model.choices import WEIGHTS, Action, Choice
from tests.model.history import History
from tests.model.walk import walk
from tests.model.world import World

READER = FrameReader(SchemaRegistry())
# An action of twice the weight is in it twice; the first is the simplest to hypothesis.
ACTIONS = st.sampled_from(
    [action for action, weight in WEIGHTS.items() for _ in range(max(1, round(weight)))]
)
PICKS = st.integers(0, 255)

HAPPENS = {
    "answered by the node",
    "refused by the node",
    "deadline, outcome unknown",
    "offline, never sent",
    "given up by the caller",
    "the relay ended the session",
    "the relay crashed",
    "cmd",
    "cmd sent again",
    "answered from memory",
    "new at the node",
    "seen at the node",
    "forgotten at the node",
    "full at the node",
    "spent on the way",
    "opened",
    "resumed",
    "superseded",
    "forged",
    "at rest",
}


class Model(RuleBasedStateMachine):
    """The world, with hypothesis making the choices."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(READER)

    @rule(action=ACTIONS, pick=PICKS)
    def step(self, action: Action, pick: int) -> None:
        """Let one thing happen."""
        self.world.step(Choice(action, pick))

    def teardown(self) -> None:
        """Let every deadline pass."""
        try:
            self.world.finish()
        finally:
            self.world.close()


TestModel = Model.TestCase
TestModel.settings = settings(examples(60, 500), stateful_step_count=100)


def walked(steps: int, seed: int) -> History:
    with closing(World(READER)) as world:
        return walk(world, steps, seed)


def test_a_short_walk_violates_nothing_and_everything_happens() -> None:
    history = walked(60_000, seed=1)
    assert set(history.counts) == HAPPENS


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_long_walk_violates_nothing() -> None:
    history = walked(1_000_000, seed=2)
    assert min(history.counts[event] for event in HAPPENS) > 100


def test_the_same_seed_is_the_same_walk() -> None:
    first, second = (walked(2000, seed=3) for _ in range(2))
    assert first.counts == second.counts
    assert [call.outcome for call in first.calls.values()] == [call.outcome for call in second.calls.values()]
