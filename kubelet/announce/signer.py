"""Signs this node's manifests, each newer than the one before, across restarts.

Must not publish: the announcer does.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from structlog.typing import FilteringBoundLogger

from kubelet.process import ticks_ms
from schemas.error_roots import StateError
from schemas.files import read_state, write_atomic
from schemas.identity_files import NodeIdentity
from schemas.kinds import MANIFEST_REF
from schemas.manifest import MAX_FUTURE_MS, MAX_TTL_MS, etag_of, sign_manifest
from schemas.registry import SchemaRegistry
from schemas.strict_json import MAX_SAFE_INTEGER
from schemas.text import printable
from schemas.times import is_credible

RESERVED_MS = 10_000
_SHORTEST_MS = 1_000


def read_last_issued_ms(file: Path) -> int:
    """Return the time in ``file``; 0 if there is none, or it cannot be read as one."""
    try:
        text = read_state(file)
        # Without its end a line is torn: the rest of a number is another number.
        return int(text) if text.endswith(b"\n") else 0
    except (FileNotFoundError, ValueError):
        return 0


class LastIssued:
    """The newest ``issued_at_ms``, kept in ``file``, or in memory alone for a node without disk.

    The file is never behind what was published: it is written ahead, and reserves the next ten seconds, so
    that manifests signed within them need no write of their own. A relay that makes a node sign again and
    again must not wear out its flash. A restarted node continues after the reserved time. A file that cannot
    be written does not stop the node: after a restart, the relay sends its mark.

    Attributes:
        ms: the newest time; 0 before the first. What a file holds beyond ``greatest_ms`` counts as nothing.
    """

    def __init__(
        self, file: Path | None, greatest_ms: int, ticks_ms: Callable[[], int], log: FilteringBoundLogger
    ) -> None:
        self._file = file
        self._ticks_ms = ticks_ms
        self._log = log
        self._written_ticks: int | None = None
        read = 0 if file is None else read_last_issued_ms(file)
        self.ms = self._reserved_ms = read if 0 <= read <= greatest_ms else 0

    def wait_ms(self, issued_at_ms: int) -> int:
        """Return how long to wait before a manifest may have this time: two writes are 10 s apart."""
        if self._file is None or issued_at_ms <= self._reserved_ms or self._written_ticks is None:
            return 0
        return max(0, self._written_ticks + RESERVED_MS - self._ticks_ms())

    def advance(self, issued_at_ms: int, now_ms: int) -> None:
        """Record the time of a manifest, before it is published."""
        self.ms = issued_at_ms
        if issued_at_ms <= self._reserved_ms:
            return
        # From the clock and not from the manifest: a node that restarts every few seconds would otherwise
        # move ahead of its clock by the whole reserve each time.
        self._reserved_ms = max(issued_at_ms, now_ms + RESERVED_MS)
        if self._file is None:
            return
        self._written_ticks = self._ticks_ms()
        try:
            write_atomic(self._file, f"{self._reserved_ms}\n")
        except OSError as error:
            self._log.warning("the time of the newest manifest is not kept", reason=printable(str(error)))

    def replace(self, issued_at_ms: int) -> None:
        """Go on behind another time; where it is an earlier one, what was reserved is void."""
        self._reserved_ms = self._reserved_ms if issued_at_ms >= self.ms else issued_at_ms
        self.ms = issued_at_ms


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest as it is sent."""

    wire: bytes
    etag: str
    issued_at_ms: int
    expires_at_ms: int


class ClockNotSetError(StateError):
    """The clock reads a time before this system existed; nothing may be signed by it."""


class ManifestSigner:
    """Makes the manifests of one node.

    ``last_issued`` is the file that remembers the newest ``issued_at_ms``, or None for a node without disk.
    ``ttl_ms`` and ``capabilities`` may be changed.
    ``ticks_ms`` are milliseconds that only ever go forward.
    """

    def __init__(  # noqa: PLR0913 - the facts that a manifest states
        self,
        *,
        identity: NodeIdentity,
        hw_fingerprint: Mapping[str, Any],
        capabilities: Sequence[Mapping[str, Any]],
        ttl_ms: int,
        now_ms: Callable[[], int],
        registry: SchemaRegistry,
        last_issued: Path | None,
        log: FilteringBoundLogger,
        ticks_ms: Callable[[], int] = ticks_ms,
    ) -> None:
        self._identity = identity
        self._hw_fingerprint = hw_fingerprint
        self.capabilities = capabilities
        self.ttl_ms = ttl_ms
        self._now_ms = now_ms
        self._schema = registry.load(MANIFEST_REF)
        self._log = log
        self._ticks_ms = ticks_ms
        self._signed_ticks: int | None = None
        # A manifest later than the last one must still expire within the numbers that JSON can carry.
        self._last = LastIssued(last_issued, MAX_SAFE_INTEGER - MAX_TTL_MS - 1, ticks_ms, log)

    def wait_s(self) -> float:
        """Return how long to wait before ``sign``: a relay may not request more often.

        Once a second is enough for what is announced at once, and the file is written once in ten seconds.
        """
        wait_ms = self._last.wait_ms(self._next_ms())
        if self._signed_ticks is not None:
            wait_ms = max(wait_ms, self._signed_ticks + _SHORTEST_MS - self._ticks_ms())
        return wait_ms / 1000

    def sign(self) -> SignedManifest:
        """Return a fresh manifest, newer than any before.

        Raises:
            ClockNotSetError: the clock cannot be right.
            ViolationError: what this node would announce does not fit the manifest's document.
        """
        now = self._now_ms()
        if not is_credible(now):
            raise ClockNotSetError("the clock is not set: wait for time synchronisation, or set it")
        self._signed_ticks = self._ticks_ms()
        issued = self._next_ms()
        wire = sign_manifest(
            node_id=self._identity.node_id,
            kid=self._identity.kid,
            hw_fingerprint=self._hw_fingerprint,
            capabilities=self.capabilities,
            issued_at_ms=issued,
            expires_at_ms=issued + self.ttl_ms,
            sign=self._identity.sign,
        )
        self._schema.check(json.loads(wire))
        self._last.advance(issued, now)
        return SignedManifest(wire, etag_of(wire), issued, issued + self.ttl_ms)

    def is_of_the_future(self, manifest: SignedManifest) -> bool:
        """Return whether no relay accepts ``manifest`` yet, if this clock is right now."""
        return manifest.issued_at_ms > self._now_ms() + MAX_FUTURE_MS

    def advance_past(self, mark_ms: int) -> bool:
        """Make the next manifest newer than ``mark_ms``, the newest that the relay has accepted.

        Also backwards: by a clock that was once far ahead this node may have issued manifests from a future
        that no relay accepts, and must not have to wait for it. Never further ahead than a relay accepts: one
        that is not honest would otherwise get manifests that are good for months. Returns whether it is done.
        """
        if mark_ms > self._now_ms() + MAX_FUTURE_MS:
            self._log.error("the relay's mark is too far ahead of this clock", mark_ms=mark_ms)
            return False
        self._last.replace(mark_ms)
        return True

    def _next_ms(self) -> int:
        return max(self._now_ms(), self._last.ms + 1)
