"""Tells the caller of a node that is not connected since when, and when to call again.

Must not decide that a node is offline: the side that holds its session does.
"""

from datetime import UTC, datetime

from relay.fleet.usability import OFFLINE_FIX
from schemas.errors import Failure, ToolError

_FIRST_RETRY_MS, _LAST_RETRY_MS = 1_000, 30_000
"""A node waits between its attempts to connect for about as long as it has been away, up to the second."""


def explained(error: ToolError, since_ms: int | None, now_ms: int) -> ToolError:
    """Return ``error``, which is NODE_OFFLINE, with what is known of the node's absence.

    ``since_ms`` is when its connection was lost; None if it was not connected since this relay started.
    """
    if since_ms is None:
        text, away_ms = "The node is not connected, and was not since this relay was started", _LAST_RETRY_MS
    else:
        away_ms = max(0, now_ms - since_ms)
        at = datetime.fromtimestamp(since_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        text = f"The node is not connected since {at}, {away_ms // 1000} s ago"
    return ToolError(
        error.failure,
        f"{text}; the command was never sent.",
        fix=OFFLINE_FIX,
        retry_after_ms=min(max(away_ms, _FIRST_RETRY_MS), _LAST_RETRY_MS),
    )


def is_offline(error: ToolError) -> bool:
    """Return whether ``error`` is that the node is not connected."""
    return error.failure is Failure.NODE_OFFLINE
