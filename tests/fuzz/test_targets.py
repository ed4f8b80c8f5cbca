import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.examples import examples
from tests.fuzz.mutation import mutated
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parent.parent.parent
SEEDS = st.integers(0, 2**48)


@pytest.mark.parametrize("name", TARGETS)
@examples(100, 1600)
@given(seed=SEEDS)
def test_a_damaged_document_raises_nothing_but_what_is_documented(name: str, seed: int) -> None:
    target = TARGETS[name]
    target.parse(mutated(target.samples, random.Random(seed)))  # noqa: S311 - a source of changes


@pytest.mark.parametrize("name", TARGETS)
@examples(25, 400)
@given(data=st.binary(max_size=200))
def test_nor_does_any_input_at_all(name: str, data: bytes) -> None:
    TARGETS[name].parse(data)


@pytest.mark.parametrize("name", TARGETS)
def test_the_documents_to_begin_from_are_read(name: str) -> None:
    target = TARGETS[name]
    for sample in target.samples:
        target.parse(sample)


def test_one_target_can_be_run_for_longer_by_hand() -> None:
    command = [sys.executable, "-P", "-m", "tests.fuzz", "topic", "--seconds", "0", "--seed", "7"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "1 inputs, nothing found\n"), done.stderr
