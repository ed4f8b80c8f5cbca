"""Attacker: a node. Tried: a ``rate_limit_rps`` so small that the time until the next call is no number.

What must happen: the second call is E_RATE_LIMITED with a ``retry_after_ms`` that clients can read, and the
deny is in the audit; a bug must not be what answers.
"""

import pytest

from schemas.strict_json import loads
from tests.fakes.callers import call_of
from tests.fakes.hub import Hub
from tests.fakes.refusals import echo_of
from tests.fakes.routers import ScriptedRouter
from tests.fakes.signer import ECHO, NODE_ID, SimulatedNode


@pytest.mark.parametrize("rate", [1e-3, 1e-15, 1e-300, 5e-324])
async def test_the_time_to_wait_is_a_number_that_clients_can_read(
    hub: Hub, node: SimulatedNode, rate: float
) -> None:
    capability = {**ECHO, "constraints": {**ECHO["constraints"], "rate_limit_rps": rate}}
    hub.connect(node, capabilities=[capability])
    router = ScriptedRouter()
    gateway = hub.gateway(router)
    token = hub.token()
    answers = [await gateway.call(call_of(token, echo_of(node), {"message": "ping"})) for _ in range(2)]
    assert answers[0].error is None
    error = loads(answers[1].text, max_bytes=4096)
    assert error["code"] == "E_RATE_LIMITED"
    assert isinstance(error["retry_after_ms"], int)
    assert len(router.commands) == 1
    assert [
        (line.get("decision"), line.get("outcome"), line["code"], line["node_id"]) for line in hub.audited()
    ] == [
        ("allow", None, "ok", NODE_ID),
        (None, "ok", "ok", NODE_ID),
        ("allow", None, "ok", NODE_ID),
        (None, "error", "E_RATE_LIMITED", NODE_ID),
    ]
