"""Renews the leaf before it expires: requested over the session, installed without dropping it.

The request is the one that the node made with its key, so the key stays. What comes back is verified and
installed by a process of its own (``kubelet.identity.install``). Must not import the library for
certificates, which the daemon does without.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from structlog.typing import FilteringBoundLogger

from schemas.files import read_state
from schemas.identity import first_certificate_in, validity_of
from schemas.identity_files import IdentityFiles, IdentityFilesError, NodeIdentity
from schemas.payloads import Renew, RenewAck, Renewed
from schemas.text import printable

AGAIN_AFTER_MS = 3_600_000
_INSTALL_TIMEOUT_S = 30
_INSTALLED = Renewed.__annotations__.keys()

Install = Callable[[Renewed], Awaitable[str | None]]
"""Verifies and installs what ``renew_ack`` holds; returns why not, or None when it is done."""


@dataclass(eq=False, repr=False)
class Renewal:
    """Renews the leaf of ``identity``, whose files are ``files``; ``renewed`` is called when that is done.

    ``ticks_ms`` only ever go forward: a clock that was ahead must not be what the next request waits for.
    """

    identity: NodeIdentity
    files: IdentityFiles
    install: Install
    renewed: Callable[[], None]
    now_ms: Callable[[], int]
    ticks_ms: Callable[[], int]
    _log: FilteringBoundLogger
    _not_before_ticks_ms: int = field(default=0, init=False)

    def request(self, *, server_roots: bool) -> Renew | None:
        """Return the payload of ``renew`` if a renewal is due; the next is due in an hour at the earliest.

        ``server_roots``: whether the relay tells of them. One of an older version refuses the question.
        """
        ticks_ms = self.ticks_ms()
        start, end = validity_of(first_certificate_in(self.identity.leaf_pem))
        is_due = self.now_ms() >= start + (end - start) * 2 // 3 and ticks_ms >= self._not_before_ticks_ms
        if self.identity.root_pem is None or not is_due:
            return None
        self._not_before_ticks_ms = ticks_ms + AGAIN_AFTER_MS
        try:
            csr = read_state(self.files.csr).decode("ascii")
        except (OSError, UnicodeDecodeError) as error:
            self._log.error("the leaf cannot be renewed", reason=printable(str(error)))
            return None
        return {"csr": csr, "server_roots": True} if server_roots else {"csr": csr}

    async def answered(self, payload: RenewAck) -> None:
        """Act on the payload of ``renew_ack``. Never raises: the old leaf serves until it ends."""
        if not payload["ok"]:
            self._log.error("relay does not renew the leaf", code=payload["error"]["code"])
            return
        reason = await self.install(payload)
        if reason is not None:
            self._log.error("the new leaf is not accepted", reason=printable(reason))
            return
        try:
            fresh = self.files.read()
        except IdentityFilesError as error:
            self._log.error("the new leaf cannot be read", reason=printable(str(error)))
            return
        self.identity.renew(fresh.leaf_pem, fresh.root_pem)
        self._log.info("leaf renewed", kid=self.identity.kid)
        self.renewed()


def installer(files: IdentityFiles) -> Install:
    """Return a function that installs into ``files``, in a process of its own."""

    async def install(payload: Renewed) -> str | None:
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "kubelet.identity.install", str(files.root)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except (OSError, RuntimeError) as error:  # a small board may have no memory or thread left for it
            return str(error)
        issued = json.dumps({name: value for name, value in payload.items() if name in _INSTALLED})
        try:
            async with asyncio.timeout(_INSTALL_TIMEOUT_S):
                _, errors = await process.communicate(issued.encode("ascii"))
        except TimeoutError:
            process.kill()
            await process.wait()
            return "it took too long"
        return None if process.returncode == 0 else errors.decode("utf-8", "replace").strip()

    return install
