"""``make bench``: measure everything, print a table, and write ``bench/out/latest.json``.

``python -P -m bench NAME...`` measures only those parts, and writes nothing. Where a part fails it ends, with
what was measured before.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.audit_sync import measure_audit_sync
from bench.board import measure_board
from bench.caller_tools import measure_caller_tools
from bench.calls import measure_calls
from bench.cli_start import measure_cli_start
from bench.cluster_revocation import measure_cluster_revocation
from bench.cross_relay import measure_cross_relay
from bench.envelope import measure_envelope
from bench.first_answer import measure_first_answer
from bench.fleet_10k import measure_fleet_10k
from bench.flooded import measure_flooded, measure_flooded_over_http
from bench.footprint import measure_footprint
from bench.lists import measure_lists
from bench.memory import measure_memory
from bench.one_board import measure_one_board
from bench.relay_start import measure_relay_start
from bench.remote_tools import measure_remote_tools
from bench.results import Figure, table, write_json
from bench.revocation import measure_revocation
from bench.sign_in import measure_sign_in
from bench.slow_clients import measure_slow_clients
from bench.storm import measure_absence, measure_storm
from bench.telemetry_fanout import measure_telemetry_fanout
from bench.tokens import measure_tokens
from bench.verification import measure_verification

OUT = Path(__file__).parent / "out" / "latest.json"

PARTS: Mapping[str, tuple[str, Callable[[], list[Figure]]]] = {
    "calls": ("calls through a relay and 1 000 mock nodes", lambda: asyncio.run(measure_calls())),
    "audit_sync": ("calls whose lines are synced first", lambda: asyncio.run(measure_audit_sync())),
    "cross_relay": ("calls by way of another relay", lambda: asyncio.run(measure_cross_relay())),
    "cli_start": ("the start of a command of the relay", lambda: [measure_cli_start()]),
    "relay_start": (
        "the start of a relay that knows 10 000 nodes",
        lambda: [asyncio.run(measure_relay_start())],
    ),
    "documents": (
        "manifests, tokens and envelopes",
        lambda: [measure_verification(), *measure_tokens(), measure_envelope()],
    ),
    "lists": ("a page of tools/list, an idle second, and bytes of a tool", measure_lists),
    "sign_in": ("sign-in without the person, and calls after it", lambda: asyncio.run(measure_sign_in())),
    "slow_clients": ("calls beside 1 000 slow clients", lambda: [asyncio.run(measure_slow_clients())]),
    "revocation": (
        "the time until a revoked node is disconnected",
        lambda: [asyncio.run(measure_revocation())],
    ),
    "cluster_revocation": (
        "the time until a node that is revoked at one relay is refused by all",
        lambda: [asyncio.run(measure_cluster_revocation())],
    ),
    "flooded": (
        "calls beside a node, a stranger or an agent that floods the relay",
        lambda: asyncio.run(measure_flooded()) + asyncio.run(measure_flooded_over_http()),
    ),
    "storm": ("5 000 nodes that reconnect at once", lambda: asyncio.run(measure_storm())),
    "absence": (
        "50 nodes whose relay was away for two minutes",
        lambda: [asyncio.run(measure_absence())],
    ),
    "memory": ("memory of a relay, and of 5 000 connected nodes", lambda: asyncio.run(measure_memory())),
    "fleet_10k": ("a relay with 10 000 nodes", lambda: asyncio.run(measure_fleet_10k())),
    "remote_tools": (
        "calls through the guarded client and the bare one",
        lambda: [asyncio.run(measure_remote_tools())],
    ),
    "telemetry_fanout": (
        "1 000 nodes sampled each second for 50 agents",
        lambda: asyncio.run(measure_telemetry_fanout()),
    ),
    "caller_tools": (
        "a local agent's calls of a tool that a caller lends",
        lambda: [asyncio.run(measure_caller_tools())],
    ),
    "board": ("what the kinds of a Linux board cost it", lambda: asyncio.run(measure_board())),
    "one_board": ("what one board costs itself and its hub", lambda: asyncio.run(measure_one_board())),
    "footprint": ("what a node costs its board", lambda: asyncio.run(measure_footprint())),
    "first_answer": ("the demo of a fresh clone, to its first answer", measure_first_answer),
}


def main(names: list[str]) -> None:
    """Measure the parts ``names``, by default all, and print them."""
    if unknown := set(names) - PARTS.keys():
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    figures: list[Figure] = []
    name = ""
    try:
        for name in names or PARTS:
            text, measure = PARTS[name]
            print(f"{text} ...", flush=True)
            figures += measure()
    except Exception as error:
        error.add_note(f"The part {name} failed; those behind it were not measured.")
        raise
    finally:
        if figures:
            print(f"\n{table(figures)}")
        if figures and not names:
            write_json(figures, OUT)
            print(f"\nwritten to {OUT.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main(sys.argv[1:])
