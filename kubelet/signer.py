"""Signs this node's manifests, each newer than the one before, across restarts.

Must not publish: that is the announcer's.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from structlog.typing import FilteringBoundLogger

from schemas.files import read_state, write_atomic
from schemas.identity_files import NodeIdentity
from schemas.kinds import MANIFEST_REF
from schemas.manifest import FIRST_CREDIBLE_MS, etag_of, sign_manifest
from schemas.registry import SchemaRegistry
from schemas.strict_json import MAX_SAFE_INTEGER
from schemas.text import printable


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest as it travels."""

    wire: bytes
    etag: str
    issued_at_ms: int
    expires_at_ms: int


class ClockNotSetError(RuntimeError):
    """The clock reads a time before this system existed; nothing may be signed by it."""


class ManifestSigner:
    """Makes the manifests of one node.

    ``last_issued`` is the file that remembers the newest ``issued_at_ms``, or None for a node without disk. A
    file that cannot be written is no reason to fall silent: after a restart, the relay tells its mark.
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
    ) -> None:
        self._identity = identity
        self._hw_fingerprint = hw_fingerprint
        self._capabilities = capabilities
        self._ttl_ms = ttl_ms
        self._now_ms = now_ms
        self._schema = registry.load(MANIFEST_REF)
        self._file = last_issued
        self._log = log
        self._last = self._read_last()

    def sign(self) -> SignedManifest:
        """Return a fresh manifest, newer than any before.

        Raises:
            ClockNotSetError: the clock cannot be right.
            ViolationError: what this node would announce does not fit the manifest's document.
        """
        now = self._now_ms()
        if now < FIRST_CREDIBLE_MS:
            raise ClockNotSetError("the clock is not set: wait for time synchronisation, or set it")
        issued = max(now, self._last + 1)
        wire = sign_manifest(
            node_id=self._identity.node_id,
            kid=self._identity.kid,
            hw_fingerprint=self._hw_fingerprint,
            capabilities=self._capabilities,
            issued_at_ms=issued,
            expires_at_ms=issued + self._ttl_ms,
            sign=self._identity.sign,
        )
        self._schema.check(json.loads(wire))
        self._remember(issued)
        return SignedManifest(wire, etag_of(wire), issued, issued + self._ttl_ms)

    def overtake(self, mark_ms: int) -> None:
        """Make the next manifest newer than ``mark_ms``, the newest that the relay says it has accepted.

        Also backwards: by a clock that was once far ahead this node may have issued manifests from a future
        that no relay accepts, and must not have to wait for it.
        """
        self._last = self._possible(mark_ms)

    def _possible(self, last_ms: int) -> int:
        """Return ``last_ms``, or 0 where no manifest can be later: numbers in it end at 2^53-1."""
        return last_ms if last_ms + self._ttl_ms < MAX_SAFE_INTEGER else 0

    def _read_last(self) -> int:
        try:
            return self._possible(int(read_state(self._file))) if self._file else 0
        except (FileNotFoundError, ValueError):
            return 0

    def _remember(self, issued_at_ms: int) -> None:
        self._last = issued_at_ms
        if self._file is None:
            return
        try:
            write_atomic(self._file, f"{issued_at_ms}\n")
        except OSError as error:
            self._log.warning("the time of the newest manifest is not kept", reason=printable(str(error)))
