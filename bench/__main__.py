"""``make bench``: measure everything, print a table, and write ``bench/out/latest.json``."""

import asyncio
from pathlib import Path

from bench.calls import measure_calls
from bench.envelope import measure_envelope
from bench.flooded import measure_flooded
from bench.footprint import measure_footprint
from bench.memory import measure_memory
from bench.results import table, write_json
from bench.revocation import measure_revocation
from bench.slow_clients import measure_slow_clients
from bench.storm import measure_absence, measure_storm
from bench.tokens import measure_tokens
from bench.verification import measure_verification

OUT = Path(__file__).parent / "out" / "latest.json"


def main() -> None:
    """Measure, show and keep."""
    print("manifests, tokens and envelopes ...", flush=True)
    figures = [measure_verification(), *measure_tokens(), measure_envelope()]
    print("calls through a relay and 1 000 mock nodes ...", flush=True)
    figures = asyncio.run(measure_calls()) + figures
    print("calls beside 1 000 slow clients ...", flush=True)
    figures.append(asyncio.run(measure_slow_clients()))
    print("the time until a revoked node is out ...", flush=True)
    figures.append(asyncio.run(measure_revocation()))
    print("calls beside a node that floods the relay ...", flush=True)
    figures += asyncio.run(measure_flooded())
    print("5 000 nodes that come back at once ...", flush=True)
    figures += asyncio.run(measure_storm())
    print("50 nodes whose relay was away for two minutes ...", flush=True)
    figures.append(asyncio.run(measure_absence()))
    print("memory of 5 000 connected nodes ...", flush=True)
    figures.append(asyncio.run(measure_memory()))
    print("what a node costs its board ...", flush=True)
    figures += asyncio.run(measure_footprint())
    write_json(figures, OUT)
    print(f"\n{table(figures)}\n\nwritten to {OUT.relative_to(Path.cwd())}")


main()
