"""Every shipped document under two implementations of JSON Schema, with values made from the document itself.

Where the two differ, a table names the reason, and the one that we use is the stricter.
"""

import json
import math
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from schemas.registry import SchemaRegistry
from schemas.violations import ViolationError
from tests.fakes.documents import second_opinion
from tests.fakes.examples import examples
from tests.fakes.schema_values import fitting, nearly, nearly_fitting
from tests.fakes.signer import NODE_ID, NOW_MS, SimulatedCa

# A strategy that a rare example is drawn from names all values of a document in its repr.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

REGISTRY = SchemaRegistry()
REFS = sorted(REGISTRY.documents)
# The bundle does not restrict a value.
JUDGING = [ref for ref in REFS if ref != "system.metrics@1.0.0"]
SECOND = {ref: second_opinion(REGISTRY, ref) for ref in REFS}
EACH = examples(4, 30)
# The first one found will do: to look for the smallest one takes most of the time.
SEARCH = settings(max_examples=3000, phases=[Phase.generate])

CALL = {"id": 1, "jsonrpc": "2.0", "method": "tools/call", "params": {}}
TOOL_IO = {"tool": "mcp.tool:a", "input": {}}


def on_texts(change: Callable[[str], str]) -> Callable[[Any], Any]:
    """Return what makes ``change`` in every text of a value."""
    return lambda value: on_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, str) else leaf)


def on_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {change(name): on_leaves(inner, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [on_leaves(inner, change) for inner in value]
    return change(value)


@dataclass(frozen=True)
class Deviation:
    """One reason why ``jsonschema`` takes what we refuse. ``without`` takes the reason out of a value."""

    ref: str
    example: Any
    without: Callable[[Any], Any]


MANIFEST = json.loads(SimulatedCa().issue().manifest())


def manifest_citing(schema_ref: str) -> Any:
    return {**MANIFEST, "capabilities": [{**MANIFEST["capabilities"][0], "schema_ref": schema_ref}]}


def sample_with_load(number: float) -> Any:
    load = {"one": number, "five": 0, "fifteen": 0}
    return {"ts_ms": NOW_MS, "node_id": NODE_ID, "uptime_s": 1, "load": load}


def call_of(tool: str) -> Any:
    return {"tool": tool, "input": {}}


DEVIATIONS = {
    "a line feed behind the end": Deviation(
        "tool_io@1.0.0", call_of("mcp.tool:a\n"), on_texts(lambda text: text.removesuffix("\n"))
    ),
    "a digit of another script": Deviation(
        "manifest@1.1.0",
        manifest_citing("mcp://schemas/system.metrics@\u0661.0.0"),
        on_texts(lambda text: "".join(str(unicodedata.decimal(char, char)) for char in text)),
    ),
    "a lone surrogate": Deviation(
        "tool_io@1.0.0",
        call_of("mcp.tool:\ud800"),
        on_texts(lambda text: text.encode("utf-8", "replace").decode("utf-8")),
    ),
    "a number that is none": Deviation(
        "system.metrics.sample@1.0.0",
        sample_with_load(math.nan),
        lambda value: on_leaves(value, lambda leaf: 0 if leaf != leaf else leaf),  # noqa: PLR0124 - NaN alone
    ),
    "a number without end": Deviation(
        "system.metrics.sample@1.0.0",
        sample_with_load(math.inf),
        lambda value: on_leaves(value, lambda leaf: 0 if leaf == math.inf else leaf),
    ),
}
# What one might expect to be read in two ways, and is not.
SAME = {
    "1.0 is an integer": ("envelope@1.0.0", {**CALL, "id": 1.0}, True),
    "0.5 is none": ("envelope@1.0.0", {**CALL, "id": 0.5}, False),
    "true is no integer": ("envelope@1.0.0", {**CALL, "id": True}, False),
    "null is no id": ("envelope@1.0.0", {**CALL, "id": None}, False),
    "an integer may be of any size": ("envelope@1.0.0", {**CALL, "id": 10**30}, True),
    "minus zero is not below zero": ("tool_io@1.0.0", {**TOOL_IO, "version": {"major": -0.0}}, True),
    "a length counts characters, not bytes": (
        "envelope@1.0.0",
        {**CALL, "idempotencyKey": "\U0001f600" * 128},
        True,
    ),
    "a length counts code points, not letters": (
        "envelope@1.0.0",
        {**CALL, "idempotencyKey": "e\u0301" * 65},
        False,
    ),
    "a dot is no line feed": ("tool_io@1.0.0", call_of("mcp.tool:a\nb"), False),
    "a dot is a carriage return": ("tool_io@1.0.0", call_of("mcp.tool:\r"), True),
    "a dot is any other end of a line": ("tool_io@1.0.0", call_of("mcp.tool:\u2028\u0085"), True),
    "NaN is no integer": ("envelope@1.0.0", {**CALL, "id": math.nan}, False),
}


def opinions(ref: str, value: Any) -> tuple[bool, bool]:
    validator = REGISTRY.load(ref)
    try:
        validator.check(value)
    except ViolationError:
        ours = False
    else:
        ours = True
    assert validator.is_valid(value) == ours
    return ours, SECOND[ref].is_valid(value)


def reasons(ref: str, value: Any) -> set[str]:
    """Return the deviations without which the two would agree about ``value``."""
    found = set()
    for name, deviation in DEVIATIONS.items():
        ours, second = opinions(ref, deviation.without(value))
        if ours == second:
            found.add(name)
    return found


@pytest.mark.holds("ENVELOPE/draft-2020-12")
@pytest.mark.parametrize("ref", REFS)
def test_what_fits_a_document_and_what_nearly_does_is_judged_alike_but_for_the_deviations_that_have_a_name(
    ref: str,
) -> None:
    refused = []

    @given(values=fitting(REGISTRY, ref).flatmap(lambda value: st.tuples(st.just(value), nearly(value))))
    @EACH
    def each(values: tuple[Any, Any]) -> None:
        good, value = values
        assert opinions(ref, good) == (True, True), "made from the document"
        ours, second = opinions(ref, value)
        if ours != second:
            assert second, "ours is the looser"
            assert reasons(ref, value), "a deviation that has no name"
        elif not ours:
            refused.append(value)

    each()
    # Without one that both refuse the agreement might be about nothing.
    if ref in JUDGING and not refused:
        refused.append(find(nearly_fitting(REGISTRY, ref), lambda value: refuse(ref, value), settings=SEARCH))
    assert all(refuse(ref, value) for value in refused)


def refuse(ref: str, value: Any) -> bool:
    return opinions(ref, value) == (False, False)


@pytest.mark.holds("ENVELOPE/draft-2020-12")
@pytest.mark.parametrize("name", DEVIATIONS)
def test_a_deviation_that_has_a_name_still_happens_and_for_that_reason_alone(name: str) -> None:
    deviation = DEVIATIONS[name]
    assert opinions(deviation.ref, deviation.example) == (False, True)
    assert opinions(deviation.ref, deviation.without(deviation.example)) == (True, True)
    assert reasons(deviation.ref, deviation.example) == {name}


@pytest.mark.parametrize("name", DEVIATIONS)
def test_what_is_nearly_a_good_value_comes_upon_every_deviation(name: str) -> None:
    deviation = DEVIATIONS[name]

    def deviates(value: Any) -> bool:
        return opinions(deviation.ref, value) == (False, True) and name in reasons(deviation.ref, value)

    found = find(nearly(deviation.without(deviation.example)), deviates, settings=SEARCH)
    assert deviates(found)


@pytest.mark.parametrize("name", SAME)
def test_both_validators_read_this_the_same_way(name: str) -> None:
    ref, value, fits = SAME[name]
    assert opinions(ref, value) == (fits, fits)
