"""``relay status``: what the relay of this state directory does now, in ten lines.

Must not run or change anything: the relay writes it on a socket, as ``relay.server.status`` makes it.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from relay.cli.options import AsJson, StateDir, state_files
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_NO
from schemas.process.status_socket import read_status
from schemas.process.status_view import (
    StatusLines,
    days_text,
    outcomes_text,
    process_text,
    readiness_text,
    show,
)
from schemas.text import counted

if TYPE_CHECKING:
    from relay.server.status import RelayStatusDocument

app = group("What the relay does now.")

_MAX_RELAYS = 8


@app.command(epilog=example("relay status --watch"))
def status(
    state_dir: StateDir = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every 2 s, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what the running relay does now. Exit code 1: it runs, and calls cannot be made."""
    directory = state_files(state_dir).root
    if not show(lambda: read_status(directory), _lines_of, as_json=as_json, watch=watch, stream=sys.stdout):
        raise SystemExit(EXIT_NO)


def _lines_of(document: Mapping[str, Any]) -> StatusLines:
    status = cast("RelayStatusDocument", document)
    subsystems, nodes, broker = status["subsystems"], status["nodes"], status["broker"]
    is_connected = "broker" in subsystems and subsystems["broker"]["ready"]
    connected = "connected" if is_connected else "not connected"
    reached = "sessions alone" if broker["url"] == "none" else f"{broker['url']}: {connected}"
    return (
        ("relay", f"{status['public_url']} on {status['listen']}, relay {status['version']}"),
        ("process", process_text(status)),
        ("ready", readiness_text(status)),
        ("broker", f"{reached}; {broker['missing']} manifests missing"),
        *(_cluster(status) if "cluster" in subsystems else ()),
        ("nodes", f"{nodes['connected']} connected of {nodes['known']} known"),
        ("silent", _silent(nodes["silent"])),
        ("canaries", subsystems["calls"]["state"]),
        ("agents' calls", outcomes_text(status["calls"]["outcomes"])),
        ("certificates", _certificates(status["certificates"], status["now_ms"])),
        ("audit", f"newest line {status['audit_head'][:12]}"),
    )


def _cluster(status: "RelayStatusDocument") -> StatusLines:
    """Return what is shown of a cluster; a relay of a version before tells less."""
    lines = [("cluster", status["subsystems"]["cluster"]["state"])]
    if own := status.get("cluster", {}).get("relay"):
        lines.append(("relay's id", own))
    if name := status.get("cluster", {}).get("name"):
        lines.append(("relay's name", f"{name}{'' if status['cluster']['sealed'] else ', not sealed'}"))
    if others := status.get("cluster", {}).get("others"):
        shown = [
            f"{each['relay']} {each.get('name') or '-'} {counted(each['nodes'], 'node')}, "
            f"seen {each['seen_s']:.0f} s ago"
            for each in others
        ]
        lines.append(("other relays", "; ".join(shown[:_MAX_RELAYS])))
    if status.get("ca") == "elsewhere":
        lines.append(("CA", "its key is on another relay, to which enrolments and renewals are forwarded"))
    return tuple(lines)


def _silent(silent: Mapping[str, str]) -> str:
    first = sorted(silent)[:3]
    more = f" and {len(silent) - len(first)} more" if len(silent) > len(first) else ""
    return ", ".join(first) + more if silent else "none: every connected node answers"


def _certificates(ends: Mapping[str, int], now_ms: int) -> str:
    return ", ".join(f"{name} ends in {days_text(end_ms - now_ms)}" for name, end_ms in ends.items())
