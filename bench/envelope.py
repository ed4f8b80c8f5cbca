"""What it costs to read a call as an envelope and a tool IO, and to check both, beside parsing its body."""

import io
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.results import Figure
from relay.calls.envelope import Call, EnvelopeCheck
from relay.settings.config import EnvelopeMode
from schemas.process.logs import make_logger
from schemas.projection import META_IDEMPOTENCY_KEY, META_TRACEPARENT
from schemas.registry import SchemaRegistry

_NODE_ID = "01hzx9k3m4p7q8r9s0t1v2w3xy"
_ROUNDS = 7
_COUNT = 5000


def measure_envelope() -> Figure:
    """Return ``envelope_us``."""
    check = EnvelopeCheck(SchemaRegistry(), EnvelopeMode.ENFORCE, make_logger("relay", io.StringIO()))
    bodies = [json.dumps(_message(number)) for number in range(_COUNT)]
    messages = [json.loads(body) for body in bodies]
    checks, parses = [], []
    for _ in range(_ROUNDS):
        checks.append(_us_each(messages, lambda message: check.check(Call(message), "")))
        parses.append(_us_each(bodies, json.loads))
    return Figure(
        name="envelope_us",
        value=statistics.median(checks),
        unit="us",
        reference="json.loads of the same body",
        reference_value=statistics.median(parses),
        wanted="<= 15 us",
    )


def _message(number: int) -> dict[str, Any]:
    """Return a call with all that a client may say beside it."""
    return {
        "jsonrpc": "2.0",
        "id": number,
        "method": "tools/call",
        "params": {
            "name": f"sysecho.{_NODE_ID}.echo.invoke",
            "arguments": {"message": "hello from the bench"},
            "_meta": {
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientCapabilities": {},
                META_IDEMPOTENCY_KEY: f"key-{number}",
                META_TRACEPARENT: f"00-{number + 1:032x}-{number + 1:016x}-01",
            },
        },
    }


def _us_each(items: Sequence[Any], work: Callable[[Any], object]) -> float:
    started = time.perf_counter()
    for item in items:
        work(item)
    return (time.perf_counter() - started) / len(items) * 1_000_000
