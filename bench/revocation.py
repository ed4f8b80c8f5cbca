"""How long a revoked node can still be called, from the moment that the CA's ledger says so."""

import asyncio
import os
import time

from bench.demo_system import demo_system
from bench.load import call_once, tool_call, until_answered
from bench.results import Figure
from relay.pki.authority import CertificateAuthority
from relay.settings.environment import now_ms

_NODES = 200
_REVOKED = 20
_READY_TIMEOUT_S = 120
_REFERENCE_MS = 1000.0
_REFUSED = b"E_ATTESTATION_FAILED"


async def measure_revocation() -> Figure:
    """Return ``revocation_to_shutout_ms``: the longest of those that were measured."""
    async with demo_system(_NODES) as system:
        ca = CertificateAuthority(system.plan.state.ca, now_ms, os.urandom)
        port = system.plan.relay_port
        took = []
        for node_id in system.mock_nodes[:_REVOKED]:
            call = tool_call(port, f"sysecho.{node_id}.echo.invoke", system.token)
            if _REFUSED in await call_once(port, call):
                raise RuntimeError("a node was shut out before it was revoked")
            await asyncio.to_thread(ca.revoke, node_id)
            started = time.perf_counter()
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await until_answered(port, call, _REFUSED)
            took.append((time.perf_counter() - started) * 1000)
    return Figure(
        name="revocation_to_shutout_ms",
        value=max(took),
        unit="ms",
        reference="the second that is promised",
        reference_value=_REFERENCE_MS,
        wanted="<= 1000 ms",
    )
