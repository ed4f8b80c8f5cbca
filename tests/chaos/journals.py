"""Reads what the relay and the nodes have written of the calls of a run.

A line that a killed process did not finish is left out. Must not judge.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relay.audit.files import numbered
from relay.audit.verify import parsed
from tests.chaos.history import RELAY, Decision, Fault, Outcome, Run

_PROMPT = (".echo.invoke", ".relays.set")
"""How the names of tools end whose calls end by echo's deadline."""


def audit(path: Path, relay: str = RELAY) -> tuple[list[Decision], list[Outcome]]:
    """Return the decisions and the outcomes in the audit of ``relay``, whose newest file is ``path``."""
    decisions, outcomes = [], []
    for line in _lines([*(file for _, file in numbered(path)), path]):
        correlation_id, at_ms = line.get("correlation_id"), line.get("ts_ms")
        if "decision" in line:
            is_allowed = line["decision"] == "allow"
            decisions.append(
                Decision(str(correlation_id), int(str(at_ms)), is_allowed, _is_prompt(line), relay)
            )
        elif "outcome" in line:
            took_ms = float(line["duration_ms"])
            outcomes.append(Outcome(str(correlation_id), int(str(at_ms)), took_ms, _is_prompt(line)))
    return decisions, outcomes


def _is_prompt(line: Mapping[str, Any]) -> bool:
    return str(line.get("tool")).endswith(_PROMPT)


def runs(log: Path, node_id: str) -> list[Run]:
    """Return the commands in the log of a node that it has run for a caller that traces its calls."""
    return [
        Run(line["traceparent"].split("-")[1], line["correlation_id"], node_id)
        for line in _lines([log])
        if line.get("event") == "command done" and "traceparent" in line
    ]


def faults_in(log: Path, part: str) -> list[Fault]:
    """Return the exceptions in the log of a program that it did not expect."""
    return [Fault(part, f"{line['event']}: {line['error']}") for line in _lines([log]) if "exception" in line]


def _lines(files: list[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        for data in file.read_bytes().splitlines():
            if (line := parsed(data)) is not None:
                yield line


def written(path: Path, record: dict[str, Any]) -> None:
    """Append ``record`` to the journal ``path``."""
    with path.open("a", encoding="ascii") as journal:
        journal.write(json.dumps(record) + "\n")
