"""Tells the relay what of ``linux.health`` is open: when that changes, and at each new session.

Codes and numbers alone, for every relay of the fleet shows them in its lists: no name of a unit or a disk
leaves the node so. Must not judge what is wrong.
"""

from collections.abc import Sequence

from kubelet.handlers.base import FindingSource, Handler
from kubelet.session.relay_frames import LinkEvent, RelayFrames
from schemas.frames import OneWayType
from schemas.payloads import OpenFinding

_SAME_MS = 1000
"""Two clocks are read for the time since when something is: it is another by some ms at each look."""


class FindingsReport:
    """Reports what the handlers find by ``frames``."""

    def __init__(self, handlers: Sequence[Handler], frames: RelayFrames) -> None:
        self._frames = frames
        self._open: Sequence[OpenFinding] | None = None
        for handler in handlers:
            if isinstance(handler, FindingSource):
                handler.on_findings = self._found
        frames.on_link(self._linked)

    def _found(self, findings: Sequence[OpenFinding]) -> None:
        before = self._open
        if before is None or len(findings) != len(before) or not all(map(_is_same, findings, before)):
            self._open = findings
            self._send()

    def _linked(self, event: LinkEvent) -> None:
        if event is not LinkEvent.LOST and self._open is not None:
            self._send()

    def _send(self) -> None:
        """Send all that is open: a frame that is lost is made up for by the next session."""
        self._frames.send(OneWayType.FINDINGS, {"findings": self._open})


def _is_same(one: OpenFinding, other: OpenFinding) -> bool:
    since, before = one["since_ms"], other["since_ms"]
    if since is not None and before is not None and abs(since - before) <= _SAME_MS:
        since = before
    return {**one, "since_ms": since} == other
