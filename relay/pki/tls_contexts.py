"""TLS at the relay's two ends: what it serves with, and how it connects to the broker.

A certificate may change while it is served: who connects from then on sees the new one, and nobody else
notices. Must not decide which certificates there are.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from relay.config import RelayConfig, TlsFiles
from relay.ledger import LedgerError
from relay.pki.authority import AuthorityError
from relay.pki.own_certificate import OwnCertificate, ServerAuthority
from schemas.text import printable
from schemas.tls import FreshContext, TlsFilesError, client_context, load_chain

INTERVAL_S = 60.0

_Stamp = tuple[tuple[int, int, int], ...]


class LiveContext:
    """What the relay serves with: a context whose certificate follows the files.

    Raises:
        OSError: the files cannot be used; the key may be readable by others.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self.context = _server_context()
        self._stamp: _Stamp = ()
        self.refresh()

    def refresh(self) -> bool:
        """Load the files if they are others than those in use; tell whether they were.

        Raises:
            OSError: as above. What was in use stays in use.
        """
        stamp = _stamp_of(self._files)
        if stamp == self._stamp:
            return False
        # On trial first: half a chain that does not fit would be the end of what is in use.
        load_chain(_server_context(), self._files.certificate, self._files.key)
        load_chain(self.context, self._files.certificate, self._files.key)
        self._stamp = stamp
        return True


class RelayTls:
    """The relay's contexts, as ``config`` wants them; its own certificate is renewed in time.

    Attributes:
        to_broker: what all connections to the broker are made with; None where that is not over TLS.

    Raises:
        AuthorityError: the CA cannot issue the relay's own certificate.
        OSError: files cannot be used; a key may be readable by others.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        config: RelayConfig,
        ca: ServerAuthority,
        *,
        now_ms: Callable[[], int],
        random_bytes: Callable[[int], bytes],
        log: FilteringBoundLogger,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._own: OwnCertificate | None = None
        self._live: LiveContext | None = None
        self._log = log
        self._sleep = sleep
        self._turn = asyncio.Lock()  # the interval and a change of the CA may come together
        self.to_broker: ssl.SSLContext | None = None
        if config.own_root or config.broker.tls:
            self._own = OwnCertificate(config.state.own_tls, ca, config.public_url, now_ms, random_bytes)
            self._own.renew()
        if config.broker.tls:
            self.to_broker = broker_context(config.state.own_tls, ca.roots, config.broker_ca)
        if config.tls is not None:
            self._live = LiveContext(config.tls)

    @property
    def served(self) -> ssl.SSLContext | None:
        """What is served with; None where that is not over TLS."""
        return self._live.context if self._live else None

    async def run(self) -> None:
        """Look from time to time whether a certificate is to be renewed or loaded, until cancelled."""
        while True:
            await self._sleep(INTERVAL_S)
            await self.refresh()

    async def refresh(self) -> bool:
        """Look now; return whether all is as it should be. What cannot be done is said in the log."""
        async with self._turn:
            try:
                # The CA may be held by somebody else, and issuing waits for the disk.
                if self._own is not None and await asyncio.to_thread(self._own.renew):
                    self._log.info("own certificate issued")
                # Not on a thread: a context must not change while a connection is made with it.
                if self._live is not None and self._live.refresh():
                    self._log.info("certificate loaded")
            except (AuthorityError, LedgerError, OSError) as error:
                self._log.error("certificate not renewed", reason=printable(str(error)))
                return False
        return True


def broker_context(shown: TlsFiles, roots: Callable[[], list[str]], broker_ca: Path | None) -> ssl.SSLContext:
    """Return a context for all connections to the broker, which is shown the relay's own certificate.

    The broker is believed by the roots in ``broker_ca`` alone; by default by the relay's own ``roots``.
    """

    def make() -> ssl.SSLContext:
        try:
            trusted = broker_ca.read_text("ascii", "replace") if broker_ca else "".join(roots())
        except (AuthorityError, LedgerError) as error:
            # paho goes on trying after an OSError, and after nothing else.
            raise TlsFilesError(str(error)) from None
        return client_context(trusted, (shown.certificate, shown.key))

    return FreshContext.of(make)


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A client that asks for new keys again and again costs the server more than itself.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context


def _stamp_of(files: TlsFiles) -> _Stamp:
    facts = (files.certificate.stat(), files.key.stat())
    return tuple((fact.st_ino, fact.st_size, fact.st_mtime_ns) for fact in facts)
