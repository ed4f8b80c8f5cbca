"""What one relay with ten thousand nodes costs: in memory, each second, with each heartbeat, call and page.

The nodes are mock nodes of ``kubelet fleet``, all of them connected over sessions of their own. Of the relay
the CPU time of its process counts, which depends less than wall time on what else the machine does. The calls
are measured in alternation with those of a second relay, which has ten nodes. ``BENCH_NODES`` is the number
of nodes for a short trial.
"""

import asyncio
import operator
import os
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.inventory import measure_inventory
from bench.large_fleet import CALLED, HEARTBEAT_S, LargeFleet
from bench.load import Target, call_once, latencies_ms, latencies_until_ms, request_of, tool_call
from bench.results import Figure
from relay.cli.demo.local_system import LocalSystem, Plan, start_system
from relay.cli.demo.processes import Processes
from relay.limits.rate_limits import AGENT_BURST_S
from relay.sessions.connects import RATE_PER_S

_NODES = int(os.environ.get("BENCH_NODES", "10000"))
_TIMEOUT_S = 600
_FEW = 10
_SLICE_S = 2
_HEARTBEATS = "edge_relay_heartbeats_total"
_PAGES = 30
_KINDS = "?view=kinds"
_ASKED, _ASKS = 100, 5
_ROUNDS, _CALLS, _PAUSE_S = 6, 60, 0.012
_STORM_PAUSE_S = 0.03
_WITHOUT_STORM_S = 15.0
_PERIOD_S = 60
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Slice:
    """The heartbeats that arrived within ``took_s`` seconds, and the CPU time of all that was done."""

    beats: float
    used_s: float
    took_s: float


async def measure_fleet_10k() -> list[Figure]:
    """Return the figures of a relay with 10 000 nodes."""
    groups = {CALLED: _FEW, "staying": _NODES // 2 - _FEW, "storming": _NODES // 2}
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-bench-") as name:
        logs, few = Path(name), Path(name) / "few"
        few.mkdir()
        async with (
            Processes.running(logs) as processes,
            Processes.running(few) as beside,
            asyncio.timeout(_TIMEOUT_S),
        ):
            small = await start_system(Plan.below(few, beside.ports), _FEW, beside, lambda _text: None)
            await small.until_listed()
            fleet = await LargeFleet.started(groups, processes)
            figures = _shown([await _connect(fleet), _rss(fleet)])
            idle_cores, *measured = await _idle_and_heartbeats(fleet)
            figures += _shown(measured)
            figures += _shown(await _pages(fleet, idle_cores))
            figures += _shown([await _calls(fleet, small)])
            figures += _shown(await _storm(fleet))
            for group in groups:
                await processes.kill(group)
            return figures + _shown(await measure_inventory(fleet))


def _shown(figures: list[Figure]) -> list[Figure]:
    """Return ``figures``, printed: the next ones take minutes, and may fail on a machine that is busy."""
    for figure in figures:
        print(f"  {figure.name:<32}{figure.value:>10,.2f} {figure.unit}", flush=True)
    return figures


async def _connect(fleet: LargeFleet) -> Figure:
    before = fleet.cpu_s()
    wanted = 0
    for group, count in fleet.groups.items():
        await fleet.start_nodes(group)
        wanted += count
        await fleet.until_connected(partial(operator.le, wanted))
    await fleet.until('edge_relay_manifests_total{outcome="accepted"', lambda count: count >= fleet.nodes)
    cost_ms = (fleet.cpu_s() - before) / fleet.nodes * 1000
    return Figure("first_connect_ms", cost_ms, "ms", "wanted of a reconnect", 2.0, "reported")


def _rss(fleet: LargeFleet) -> Figure:
    rss = fleet.relay.memory_info().rss / _MIB
    return Figure("relay_rss_mib_10k", rss, "MiB", "10 000 nodes of 32 KiB", 312.5, "<= 400")


async def _idle_and_heartbeats(fleet: LargeFleet) -> tuple[float, Figure, Figure]:
    """Return the cores that the idle relay uses, and the figures of that and of one period of heartbeats.

    For as long as two heartbeats are apart, the CPU time of each slice is taken beside the heartbeats in it.
    The nodes started within a part of that time, so in the fifth of the slices with the fewest there is none,
    or hardly any. A line through all slices would not begin at an idle one: the more heartbeats arrive
    together, the less each costs.
    """
    slices = []
    beats, used, at = await fleet.value(_HEARTBEATS), fleet.cpu_s(), time.perf_counter()
    end = at + HEARTBEAT_S
    while at < end:
        await asyncio.sleep(_SLICE_S)
        was = beats, used, at
        beats, used, at = await fleet.value(_HEARTBEATS), fleet.cpu_s(), time.perf_counter()
        slices.append(_Slice(beats - was[0], used - was[1], at - was[2]))
    idle = sorted(slices, key=lambda each: each.beats)[: len(slices) // 5]
    idle_cores = sum(each.used_s for each in idle) / sum(each.took_s for each in idle)
    above_idle_s = sum(each.used_s - idle_cores * each.took_s for each in slices)
    # Each node's counts twice: it comes over its session, and over the broker.
    period_s = 2 * fleet.nodes * above_idle_s / sum(each.beats for each in slices)
    return (
        idle_cores,
        Figure("idle_second_ms_10k", idle_cores * 1000, "ms", "a second", 1000, "<= 30 ms"),
        Figure("heartbeats_period_s_10k", period_s, "s", "the period", _PERIOD_S, "<= 6 s"),
    )


async def _pages(fleet: LargeFleet, idle_cores: float) -> list[Figure]:
    """Return what lists and the tools that choose nodes cost; each has its wall time beside it."""
    port, token = fleet.plan.relay_port, fleet.token
    asked = fleet.ids("staying")[: _ASKED * _ASKS]
    page = request_of(port, token, "tools/list", {})
    kinds = request_of(port, token, "tools/list", {}, _KINDS)
    found = {"name": "find_nodes", "arguments": {"query": asked[0][:8]}}
    find = request_of(port, token, "tools/call", found, _KINDS)
    asks = [
        request_of(port, token, "tools/call", {"name": "sysecho.invoke", "arguments": arguments}, _KINDS)
        for arguments in ({"message": "ping", "nodes": asked[each::_ASKS]} for each in range(_ASKS))
    ]
    answered = b'"answered":%d,' % len(asked[::_ASKS])
    return [
        await _request_cpu(fleet, idle_cores, name, requests, expected, most_ms)
        for name, requests, expected, most_ms in (
            ("list_page_cpu_ms_10k", [page] * _PAGES, b'"nextCursor"', 15),
            ("kinds_list_cpu_ms_10k", [kinds] * _PAGES, b'"tools"', 1),
            ("find_nodes_cpu_ms_10k", [find] * _PAGES, b'"isError":false', 5),
            ("ask_100_nodes_cpu_ms_10k", asks, answered, 40),
        )
    ]


async def _request_cpu(  # noqa: PLR0913, PLR0917 - what is sent, and how it is judged
    fleet: LargeFleet, idle_cores: float, name: str, requests: list[bytes], expected: bytes, most_ms: int
) -> Figure:
    port = fleet.plan.relay_port
    await asyncio.sleep(AGENT_BURST_S + 1)  # so that no request is refused for its agent's rate
    body = await call_once(port, requests[0])
    if expected not in body.replace(b" ", b""):
        raise RuntimeError(f"{name}: {body[:500]!r}")
    before, started = fleet.cpu_s(), time.perf_counter()
    for request in requests:
        await call_once(port, request)
    wall_s = time.perf_counter() - started
    cpu_ms = (fleet.cpu_s() - before - idle_cores * wall_s) / len(requests) * 1000
    wall_ms = wall_s / len(requests) * 1000
    return Figure(name, cpu_ms, "ms", "its wall time", wall_ms, f"<= {most_ms} ms")


async def _calls(fleet: LargeFleet, small: LocalSystem) -> Figure:
    took: dict[Target, list[float]] = {}
    for port, token, nodes in (
        (fleet.plan.relay_port, fleet.token, fleet.ids(CALLED)),
        (small.plan.relay_port, small.token, small.mock_nodes),
    ):
        took[Target(port, [tool_call(port, f"sysecho.{node}.echo.invoke", token) for node in nodes])] = []
    for _ in range(_ROUNDS):
        for target, found in took.items():
            found.extend(await latencies_ms(target, _CALLS, _PAUSE_S))
    large, few = map(statistics.median, took.values())
    return Figure("tools_call_p50_10k", large, "ms", "a relay with 10 nodes", few, "ratio <= 1.2")


async def _storm(fleet: LargeFleet) -> list[Figure]:
    """Return the figures of half of the fleet that reconnects at once, and of calls to others meanwhile.

    Of the CPU time, what the nodes that stay and the calls to them cost for as long is subtracted, as it was
    measured before: heartbeats and pings are figures of their own.
    """
    port, nodes_pid = fleet.plan.relay_port, fleet.processes.pid("storming")
    target = Target(
        port, [tool_call(port, f"sysecho.{node}.echo.invoke", fleet.token) for node in fleet.ids(CALLED)]
    )
    staying = fleet.nodes - fleet.groups["storming"]
    os.kill(nodes_pid, signal.SIGSTOP)
    await fleet.until_connected(lambda connected: connected <= staying)
    used, started = fleet.cpu_s(), time.perf_counter()
    quiet = asyncio.create_task(asyncio.sleep(_WITHOUT_STORM_S))
    before = await latencies_until_ms(target, quiet, _STORM_PAUSE_S)
    others_share = (fleet.cpu_s() - used) / (time.perf_counter() - started)
    used, started = fleet.cpu_s(), time.perf_counter()
    os.kill(nodes_pid, signal.SIGCONT)
    back = asyncio.create_task(fleet.until_connected(lambda connected: connected >= fleet.nodes))
    meanwhile = await latencies_until_ms(target, back, _STORM_PAUSE_S)
    await back
    took_s = time.perf_counter() - started
    handshakes_s = fleet.cpu_s() - used - others_share * took_s
    handshake_ms = handshakes_s / fleet.groups["storming"] * 1000
    return [
        Figure(
            "reconnect_storm_5000_s",
            took_s,
            "s",
            f"admitted at {RATE_PER_S:.0f} a second",
            fleet.groups["storming"] / RATE_PER_S,
            "<= 35",
        ),
        Figure("storm_cpu_ms_per_handshake", handshake_ms, "ms", "wanted", 2.0, "<= 2"),
        Figure(
            "storm_call_p99_ms_10k", _p99(meanwhile), "ms", "the same call before", _p99(before), "<= 500"
        ),
    ]


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]
