"""Every target on damaged documents, on random bytes, and on the inputs that guided runs have kept."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.error_roots import OperatorError, PeerError
from tests.fakes.examples import examples
from tests.fuzz.corpus import KEPT, MAX_BYTES, inputs_of
from tests.fuzz.target import REFUSED, tried
from tests.fuzz.targets import TARGETS

PARSERS = [name for name in TARGETS if not name.startswith("live_")]
"""Those that take microseconds: a live session takes milliseconds."""
SEEDS = st.integers(0, 2**48)


@pytest.mark.parametrize("name", PARSERS)
@examples(40, 100)
@given(seed=SEEDS)
def test_a_damaged_document_raises_nothing_but_what_is_documented(name: str, seed: int) -> None:
    target = TARGETS[name]
    target.parse(target.mutated(target.samples, random.Random(seed)))  # noqa: S311 - a source of changes


@pytest.mark.parametrize("name", PARSERS)
@examples(10, 25)
@given(data=st.binary(max_size=200))
def test_nor_does_any_input_at_all(name: str, data: bytes) -> None:
    TARGETS[name].parse(data)


@pytest.mark.parametrize("name", TARGETS)
def test_the_documents_to_begin_from_are_read(name: str) -> None:
    target = TARGETS[name]
    for sample in target.samples:
        target.parse(sample)


@pytest.mark.parametrize("name", TARGETS)
def test_so_is_every_input_that_was_kept(name: str) -> None:
    inputs = inputs_of(name)
    assert inputs, f"python -P -m tests.fuzz --keep {name}"
    for file in inputs:
        TARGETS[name].parse(file.read_bytes())


def test_what_is_kept_is_of_a_target_and_within_its_bound() -> None:
    assert {directory.name for directory in KEPT.iterdir()} <= TARGETS.keys()
    assert sum(file.stat().st_size for file in KEPT.glob("*/*")) <= MAX_BYTES


# --- how a target judges an error -----------------------------------------------------------------------


def raised(error: Exception, cause: Exception | None = None) -> object:
    raise error from cause


def test_a_declared_error_is_no_finding() -> None:
    assert tried(lambda: raised(ValueError("no number")), ValueError) is REFUSED
    assert tried(lambda: 7, ValueError) == 7


@pytest.mark.parametrize("planted", [KeyError("x"), RecursionError(), AssertionError()], ids=repr)
def test_any_other_error_is_one(planted: Exception) -> None:
    with pytest.raises(type(planted)):
        tried(lambda: raised(planted), ValueError)


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(OperatorError("two\nlines"), id="two lines"),
        pytest.param(OperatorError("\x1b[31mred"), id="a control character"),
        pytest.param(PeerError("caf\u00e9"), id="a letter of the other end's"),
        pytest.param(OperatorError("it is not c2VjcmV0LXNl"), id="a part of a secret"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "as a cause"])
def test_so_is_a_text_that_must_not_be_shown(planted: Exception, *, wrapped: bool) -> None:
    def parse() -> object:
        return raised(OperatorError("it is damaged"), planted) if wrapped else raised(planted)

    with pytest.raises(AssertionError):
        tried(parse, OperatorError, PeerError, secret="c2VjcmV0LXNlY3JldA")


def test_what_a_traceback_does_not_show_is_not_shown() -> None:
    def parse() -> object:
        try:
            return raised(ValueError("c2VjcmV0LXNlY3JldA"))
        except ValueError:
            raise OperatorError("it is damaged") from None

    assert tried(parse, OperatorError, secret="c2VjcmV0LXNlY3JldA") is REFUSED


def test_each_module_of_targets_is_in_the_table() -> None:
    modules = {target.parse.__module__.rpartition(".")[2] for target in TARGETS.values()}
    sources = Path(__file__).parent.glob("*.py")
    assert modules == {source.stem for source in sources if "\nTARGETS: Final = {" in source.read_text()} - {
        "planted"
    }
