"""``system.echo`` on the node."""

import pytest

from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.shipped_kinds import echo_handler
from tests.fakes.signer import NODE_ID, NOW_MS


@pytest.mark.holds("RFC-0005/7/handler", "RFC-0005/9/capability")
def test_echo_is_announced_exactly_as_rfc_0005_section_9_writes_it() -> None:
    assert echo_handler(NODE_ID, FakeClock(NOW_MS)).capability == {
        "cap_id": "echo",
        "kind": "system.echo",
        "schema_ref": "mcp://schemas/system.echo.invoke.input@1.0.0",
        "verbs": ["invoke"],
        "safety_class": "read_only",
        "constraints": {"rate_limit_rps": 10, "max_concurrency": 4, "deadline_ms_default": 2000},
    }


async def test_the_message_comes_back_with_the_node_and_the_time() -> None:
    result = await echo_handler(NODE_ID, FakeClock(NOW_MS)).invoke("invoke", {"message": 'ping "\\'})
    assert result == {"message": 'ping "\\', "received_at_ms": NOW_MS, "node_id": NODE_ID}
    SchemaRegistry().load("system.echo.invoke.output@1.0.0").check(result)
