"""23. An operator follows a call from the agent to the node, in a collector of traces.

Steps: run a relay and a node that export spans · call a tool with a trace · find both spans in the collector,
the node's below the relay's, and nothing of arguments or results in what was sent.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from relay.cli.demo.local_system import LocalSystem, kubelet_command, start_system
from relay.cli.demo.processes import Processes
from tests.fakes.collector import collecting
from tests.fakes.demo import plan_below
from tests.fakes.polling import before_asking_again

pytestmark = pytest.mark.long

BOUND_S = 60
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
AGENTS_SPAN = "b7ad6b7169203331"
SERVICES = ("edge-relay", "edge-kubelet")
FAILED = 2  # the status of OpenTelemetry
MESSAGE = "what is echoed is in no span"


async def is_answered(system: LocalSystem) -> bool:
    """Make a traced call, which is answered once the node is connected again."""
    meta = cast("Any", {"traceparent": f"00-{TRACE_ID}-{AGENTS_SPAN}-01"})
    async with system.client() as client:
        name = f"sysecho.{system.real_node}.echo.invoke"
        return not (await client.call_tool(name, {"message": MESSAGE}, meta=meta)).is_error


async def test_the_spans_of_relay_and_node_meet_in_one_trace(tmp_path: Path) -> None:
    with collecting() as collector:
        otlp = ("--otlp", collector.url)
        plan = replace(plan_below(tmp_path), relay_options=otlp)
        async with asyncio.timeout(BOUND_S), Processes.running(tmp_path) as processes:
            system = await start_system(plan, 0, processes, lambda _text: None)
            await processes.kill("kubelet")
            await processes.start("kubelet", [*kubelet_command(plan), *otlp])
            while not await is_answered(system):
                await before_asking_again()
            found: dict[str, Any] = {}
            while len(found) < len(SERVICES):
                # Of the relay also calls while the node was away: the newest is the one that was answered.
                service, span = await asyncio.to_thread(collector.next)
                if span.status.code != FAILED:
                    found[service] = span
    relay, node = (found[service] for service in SERVICES)
    assert {span.trace_id.hex() for span in (relay, node)} == {TRACE_ID}
    assert relay.parent_span_id.hex() == AGENTS_SPAN
    assert node.parent_span_id == relay.span_id
    assert node.start_time_unix_nano <= node.end_time_unix_nano
    names = {attribute.key: attribute.value.string_value for attribute in relay.attributes}
    assert (names["edge.node_id"], names["edge.outcome"]) == (system.real_node, "ok")
    assert not any(MESSAGE.encode() in body for body in collector.raw)
