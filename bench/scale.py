"""``make bench-scale``: what a fleet of five relays costs as it grows, as a table, as JSON and as a plot.

``NODES`` is its largest size; it is measured at five sizes on the way there, and each is written when it is
measured, so that a machine that does not bear the next leaves what it bore. By hand: the largest fleet takes
most of an hour, and a machine that does nothing else.
"""

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil

from bench.kept_identities import make_new
from bench.load import Target, call_once, latencies_ms, tool_call, until_answered
from bench.scale_fleet import SERVERS, ScaleFleet
from bench.scale_plot import drawn
from relay.cli.demo.local_system import Plan
from relay.cli.demo.processes import Processes
from relay.pki.authority import CertificateAuthority
from relay.settings.environment import now_ms

OUT = Path(__file__).parent / "out"

_SMALL = 100
_TIMEOUT_S = 3600
_IDLE_S = 20.0
_CALLED, _ROUNDS, _CALLS, _PAUSE_S = 50, 5, 100, 0.005
_REVOKED = 3
_SHUT_OUT_TIMEOUT_S = 30
_MIB = 1024 * 1024
_OBSERVER = "one more relay"


@dataclass(frozen=True, slots=True)
class Size:
    """What was measured with ``nodes`` connected. Of figures of a relay, the mean of all five.

    Attributes:
        rss_mib: memory of a relay.
        verify_s: until one more relay has verified the manifests of all nodes, from its subscription.
        verify_cpu_us: the CPU time of that for each manifest.
        idle_cpu_ms: CPU time of a relay in a second without calls, with the heartbeats that fall into it.
        servers_cpu_ms: that of the nats-server and the MQTT broker.
        shut_out_ms: until every relay refuses calls of a node that was revoked at one: the longest.
        own_p50_ms: a call of a node of the relay that is called.
        other_p50_ms: a call of a node of another relay.
    """

    nodes: int
    rss_mib: float
    verify_s: float
    verify_cpu_us: float
    idle_cpu_ms: float
    servers_cpu_ms: float
    shut_out_ms: float
    own_p50_ms: float
    other_p50_ms: float


async def measure(nodes: int, step: Callable[[Sequence[Size], float], None]) -> list[Size]:
    """Return what the fleet costs at each of its sizes.

    ``step`` is called after each of them, with those that are measured and the seconds that the last took.

    Raises:
        StartError: a process has ended by itself.
        OperatorError: this machine allows too few open files.
    """
    sizes = sizes_up_to(nodes)
    steps = [size - before for size, before in zip(sizes, [0, *sizes], strict=False)]
    groups = {f"group-{number}": count for number, count in enumerate(steps)}
    log = OUT / "scale-log"
    make_new(log)
    async with Processes.running(log) as processes, asyncio.timeout(_TIMEOUT_S):
        fleet = await ScaleFleet.started(groups, processes)
        measured = list[Size]()
        for group, size in zip(groups, sizes, strict=True):
            began = time.monotonic()
            await fleet.start_nodes(group)
            # Without those that were revoked at the sizes before.
            left = size - len(measured) * _REVOKED
            await fleet.until_connected(left)
            for plan in fleet.plans.values():
                await fleet.until_accepted(plan, size)
            measured.append(await _size(fleet, left, group))
            step(measured, time.monotonic() - began)
        return measured


def sizes_up_to(nodes: int) -> list[int]:
    """Return five sizes, from a small fleet to ``nodes``."""
    return sorted({min(_SMALL, nodes), *(nodes // part for part in (8, 4, 2, 1) if nodes // part > _SMALL)})


async def _size(fleet: ScaleFleet, nodes: int, group: str) -> Size:
    relays = list(fleet.plans)
    verify_s, verify_cpu_us = await _verified(fleet, nodes)
    before, server_before = fleet.cpu_s(relays), fleet.cpu_s(SERVERS)
    await asyncio.sleep(_IDLE_S)
    idle_s, servers_s = fleet.cpu_s(relays) - before, fleet.cpu_s(SERVERS) - server_before
    own_ms, other_ms = await _calls(fleet, fleet.ids("group-0")[_REVOKED:][:_CALLED])
    rss = [psutil.Process(fleet.processes.pid(name)).memory_info().rss / _MIB for name in relays]
    return Size(
        nodes,
        statistics.mean(rss),
        verify_s,
        verify_cpu_us,
        idle_s / len(relays) / _IDLE_S * 1000,
        servers_s / _IDLE_S * 1000,
        max([await _shut_out_ms(fleet, node_id) for node_id in fleet.ids(group)[:_REVOKED]]),
        own_ms,
        other_ms,
    )


async def _verified(fleet: ScaleFleet, nodes: int) -> tuple[float, float]:
    """Start one more relay, and return how long it verifies the fleet, and the CPU time of each manifest."""
    plan, log = fleet.another(), fleet.processes.log(_OBSERVER)
    read = log.stat().st_size if log.exists() else 0
    await fleet.start_relay(_OBSERVER, plan)
    before = fleet.cpu_s([_OBSERVER])
    ended_s = await fleet.until_accepted(plan, nodes)
    used_s = fleet.cpu_s([_OBSERVER]) - before
    lines = map(json.loads, log.read_bytes()[read:].splitlines())
    await fleet.processes.stop(_OBSERVER)
    # The first time: a broker that disconnects the relay sends it all again.
    subscribed = next(line["ts"] for line in lines if line["event"] == "broker connected")
    return ended_s - datetime.fromisoformat(subscribed).timestamp(), used_s / nodes * 1e6


async def _calls(fleet: ScaleFleet, nodes: Sequence[str]) -> tuple[float, float]:
    """Return the median of calls of the first relay's own nodes, and of those of others."""
    held = await _held_by_first(fleet, nodes)
    own, other = ([node for node in nodes if (node in held) is mine] for mine in (True, False))
    took: list[list[float]] = [[], []]
    for _ in range(_ROUNDS):
        for ids, found in zip((own, other), took, strict=True):
            target = Target(fleet.first.relay_port, [_call(fleet, fleet.first, node) for node in ids])
            found.extend(await latencies_ms(target, _CALLS, max(_PAUSE_S, 0.2 / len(ids))))
    own_ms, other_ms = map(statistics.median, took)
    return own_ms, other_ms


async def _held_by_first(fleet: ScaleFleet, nodes: Sequence[str]) -> set[str]:
    """Return which of ``nodes`` the first relay holds: it asks another relay for all others."""
    held = set()
    for node in nodes:
        asked = 'edge_relay_cluster_commands_total{outcome="ok",side="asked"'
        before = await fleet.value(fleet.first, asked)
        await call_once(fleet.first.relay_port, _call(fleet, fleet.first, node))
        if await fleet.value(fleet.first, asked) == before:
            held.add(node)
    return held


async def _shut_out_ms(fleet: ScaleFleet, node_id: str) -> float:
    """Revoke a node where the CA is; return how long any relay still calls it."""
    ca = CertificateAuthority(fleet.first.state.ca, now_ms, os.urandom)
    await asyncio.to_thread(ca.revoke, node_id)
    began = time.perf_counter()
    async with asyncio.timeout(_SHUT_OUT_TIMEOUT_S):
        for plan in fleet.plans.values():
            await until_answered(plan.relay_port, _call(fleet, plan, node_id), b"E_ATTESTATION_FAILED")
    return (time.perf_counter() - began) * 1000


def _call(fleet: ScaleFleet, plan: Plan, node_id: str) -> bytes:
    """Return an echo by way of a relay."""
    return tool_call(plan.relay_port, f"sysecho.{node_id}.echo.invoke", fleet.token)


def table(measured: Sequence[Size]) -> str:
    """Return the sizes as aligned columns, a row for each figure."""
    rows = [
        [name, *(f"{getattr(size, name):,.2f}".removesuffix(".00") for size in measured)] for name in _NAMES
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    )


_NAMES = tuple(Size.__dataclass_fields__)


def main() -> None:
    """Measure, and write what was found."""
    nodes = int(os.environ.get("NODES", "50000"))
    if nodes < 2 * _SMALL:
        sys.exit(f"NODES is at least {2 * _SMALL}: a fleet is compared with one of {_SMALL}")
    measured = asyncio.run(measure(nodes, write))
    print(f"\n{table(measured)}\n\nwritten to {OUT / 'scale.json'} and scale.svg")


def write(measured: Sequence[Size], took_s: float) -> None:
    """Write the sizes that are measured, as JSON and as a plot."""
    rows = [asdict(size) for size in measured]
    (OUT / "scale.json").write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
    (OUT / "scale.svg").write_text(drawn(rows), "ascii")
    print(f"{measured[-1].nodes} nodes: {took_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
