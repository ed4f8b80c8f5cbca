"""A process of its own that calls one tool again and again, and writes a line for each call.

    python3 -P steady_caller.py URL ROOTS TOKEN-FILE TOOL

A line is a JSON list: when the call began, when it ended, and its one outcome: ``ok``, or what the relay or
the network said instead. SIGTERM ends it, between two calls. Needs nothing but Python, so that an upgrade of
what it calls changes nothing of it.
"""

import json
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

BOUND_S = 30
_PAUSE_S = 0.25
_VERSION = "2025-11-25"


class Made(NamedTuple):
    """One call: the times are those of the machine's clock, in seconds."""

    began: float
    ended: float
    outcome: str


def calls_of(printed: str) -> list[Made]:
    """Return the calls of what a caller has printed until now."""
    lines = (line for line in printed.splitlines(keepends=True) if line.endswith("\n"))
    return [Made(*json.loads(line)) for line in lines]


def first_answer(printed: str, since: float) -> float | None:
    """Return when the first call that began after ``since`` had its result."""
    return next(
        (call.ended for call in calls_of(printed) if call.began > since and call.outcome == "ok"), None
    )


def failed_outside(printed: str, restarts: Sequence[tuple[float, float]]) -> list[Made]:
    """Return the calls that had no result, although they ran during none of ``restarts``."""
    failed = [call for call in calls_of(printed) if call.outcome != "ok"]
    return [
        call for call in failed if not any(begin < call.ended and call.began < end for begin, end in restarts)
    ]


class Refused(Exception):  # noqa: N818  # an outcome
    """The relay answered, and not with a result."""


def main(url: str, roots: str, token: str, tool: str) -> None:
    """Call ``tool`` until SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    tls = ssl.create_default_context(cafile=roots)
    headers = {
        "Authorization": f"Bearer {Path(token).read_text('ascii').strip()}",
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
    }
    session: dict[str, str] = {}

    def send(message: dict[str, Any]) -> tuple[Any, Any]:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        request = urllib.request.Request(url, body, headers | session)  # noqa: S310  # https, by its caller
        with urllib.request.urlopen(request, timeout=BOUND_S, context=tls) as answer:  # noqa: S310
            return answer.headers, answer.read().decode()

    def call(number: int) -> None:
        if not session:
            client = {"name": "steady", "version": "1"}
            params = {"protocolVersion": _VERSION, "capabilities": {}, "clientInfo": client}
            answered, _ = send({"id": 0, "method": "initialize", "params": params})
            session["MCP-Protocol-Version"] = _VERSION
            if answered["Mcp-Session-Id"]:
                session["Mcp-Session-Id"] = answered["Mcp-Session-Id"]
            send({"method": "notifications/initialized"})
        _, text = send({"id": number, "method": "tools/call", "params": {"name": tool, "arguments": {}}})
        # One event, or the message itself; and it is the answer of this call.
        lines = [
            line.removeprefix("data:") for line in text.splitlines() if not line.startswith(("event", ":"))
        ]
        answers = [json.loads(line) for line in lines if line.strip().startswith("{")]
        (answer,) = (each for each in answers if each.get("id") == number)
        if "error" in answer or answer["result"].get("isError"):
            raise Refused(json.dumps(answer)[:300])

    for number in count(1):
        began = time.time()
        try:
            call(number)
            outcome = "ok"
        except (OSError, ValueError, Refused) as reason:
            # Sessions do not outlive a relay.
            session.clear()
            outcome = f"{type(reason).__name__}: {reason}"
        print(json.dumps([began, time.time(), outcome]), flush=True)
        if signal.sigtimedwait({signal.SIGTERM}, _PAUSE_S):
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
