"""``kubelet status``: what the daemon of this state directory does now, in ten lines.

Must not run or change anything: the daemon tells it over a socket.
"""

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kubelet.cli.options import StateDir, directory_of
from schemas.process.cli_config import AsJson
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_NO
from schemas.process.status_socket import read_status
from schemas.process.status_view import (
    StatusLines,
    days_text,
    outcomes_text,
    process_text,
    readiness_text,
    seconds_text,
    show,
)

app = group("What the daemon does now.")


@app.command(epilog=example("edge-kubelet status --watch"))
def status(
    state_dir: StateDir = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every 2 s, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what the running daemon does now. Exit code 1: it runs, and calls do not flow."""
    directory = directory_of(state_dir)
    if not show(lambda: read_status(directory), _lines_of, as_json=as_json, watch=watch, stream=sys.stdout):
        raise SystemExit(EXIT_NO)


def _lines_of(status: Mapping[str, Any]) -> StatusLines:
    relay, calls, subsystems = status["relay"], status["calls"], status["subsystems"]
    return (
        ("node", f"{status['node_id']}, kubelet {status['version']}"),
        ("process", process_text(status)),
        ("ready", readiness_text(status)),
        ("relay", f"{_relay(relay)}: {subsystems['relay']['state']}, {relay['sessions']} sessions so far"),
        ("heartbeat", _heartbeat(relay)),
        ("calls", f"{outcomes_text(calls['outcomes'])}; {calls['in_flight']} in flight"),
        ("manifest", _manifest(status)),
        ("broker", _broker(status["broker"], subsystems["broker"]["state"])),
        ("certificate", f"ends in {days_text(status['certificate_expires_at_ms'] - status['now_ms'])}"),
        ("agents here", f"{subsystems['caller tools']['state']}; {status['faults']} faults logged"),
    )


def _relay(relay: Mapping[str, Any]) -> str:
    others = len(relay["relays"]) - 1
    named = f"{relay['url']} and {others} more" if others else str(relay["url"])
    return named if relay["connected_to"] in {None, relay["url"]} else f"{named}, by {relay['connected_to']}"


def _heartbeat(relay: Mapping[str, Any]) -> str:
    ago_s = relay["acknowledged_s_ago"]
    acknowledged = "no session" if ago_s is None else f"acknowledged {seconds_text(ago_s)} ago"
    return f"every {relay['heartbeat_s']:g} s, {acknowledged}"


def _manifest(status: Mapping[str, Any]) -> str:
    manifest = status["manifest"]
    if manifest["etag"] is None:
        return "not signed yet"
    return f"{manifest['etag'][:12]}, ends in {days_text(manifest['expires_at_ms'] - status['now_ms'])}"


def _broker(broker: Mapping[str, Any], state: str) -> str:
    received = broker["relay_received"]
    if received is None:
        seen = "what the relay receives by it is not known"
    elif received in broker["published"]:
        seen = "the relay receives what is published"
    else:
        seen = "the relay receives something else by it"
    return f"{broker['url']}: {state}; {seen}"
