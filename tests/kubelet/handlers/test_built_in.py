"""The handlers of the kinds that ship: each in the module of its kind's name."""

import asyncio
import io
import json

import pytest

from kubelet.ceiling import OutsideCeilingError
from kubelet.handlers.base import ToolFault
from kubelet.handlers.factory import make_handlers
from kubelet.handlers.verbs import commands_per_s
from schemas.delivery import MOST_COMMANDS_PER_S
from schemas.kinds import RFC_0001, shipped_names
from schemas.process.logs import make_logger
from schemas.registry import read_contract
from tests.fakes.shipped_kinds import announced, examples
from tests.fakes.signer import NODE_ID

LOG = make_logger("kubelet", io.StringIO())
FURTHER = tuple(name for name in shipped_names() if name not in RFC_0001)
OF_PROGRAMS = {name for name in FURTHER if name.startswith("linux.")}
"""Most run programs of the system, or look at all of it."""


def test_a_node_announces_rfc_0001s_kinds_and_no_other_that_is_not_named() -> None:
    """A relay that does not know a kind rejects the whole manifest."""
    assert [each.capability["kind"] for each in make_handlers(NODE_ID, LOG)] == sorted(RFC_0001)


def test_a_node_can_announce_all_kinds_at_once() -> None:
    lines = io.StringIO()
    handlers = make_handlers(NODE_ID, make_logger("kubelet", lines), read_contract(FURTHER))
    missing = [line["kind"] for line in map(json.loads, lines.getvalue().splitlines())]
    assert sorted([*(each.capability["kind"] for each in handlers), *missing]) == shipped_names()
    assert set(missing) <= {"linux.journal", "linux.units"}  # where systemd does not run
    assert commands_per_s(handlers) <= MOST_COMMANDS_PER_S


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.integration) if name in OF_PROGRAMS else name
        for name in shipped_names()
    ],
)
async def test_a_handler_announces_its_row_and_answers_the_example_of_each_verb(name: str) -> None:
    contract = read_contract(() if name in RFC_0001 else (name,))
    kind = contract.kinds.get(name)
    found = [each for each in make_handlers(NODE_ID, LOG, contract) if each.capability["kind"] == name]
    if not found:
        pytest.skip(f"this machine lacks what {name} reads")
    [handler] = found
    assert kind is not None
    assert handler.capability == announced(kind)
    running = asyncio.create_task(handler.run())
    for verb in kind.verbs.values() if kind.safety_class == "read_only" else ():
        try:
            result = await handler.invoke(verb.name, examples(name)[verb.input_ref])
        except OutsideCeilingError:
            continue  # no owner names a directory here
        except ToolFault as fault:
            if fault.code not in kind.faults:
                raise
            continue  # this machine lacks what the kind reads
        contract.registry.load(verb.output_ref).check(verb.shown(result))
        assert result["node_id"] == NODE_ID
    running.cancel()
    await asyncio.wait([running])
