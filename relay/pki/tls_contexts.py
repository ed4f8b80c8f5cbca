"""TLS at the relay's two ends: what it serves with, and how it connects to the broker.

A certificate may change while it is served: new connections are shown the new one, open ones go on.
Must not decide which certificates there are.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from relay.pki.errors import AuthorityStateError
from relay.pki.own_certificate import (
    BROKER_NAME,
    RELAY_NAME,
    BrokerCertificate,
    OwnAuthority,
    ServedCertificate,
    public_key_pem,
)
from relay.settings.config import RelayConfig, TlsFiles
from schemas.addresses import host_of
from schemas.error_roots import PeerError, StateError
from schemas.health import Loop
from schemas.text import printable
from schemas.tls import FreshContext, TlsFilesError, client_context, load_chain

INTERVAL_S = 60.0
_ROUND_S = 120.0

_Stamp = tuple[tuple[int, int, int], ...]


Certify = Callable[[str, str], Awaitable[str]]
"""Has a certificate issued for a use and a public key, PEM, by another relay of the fleet; returns its PEM.

Raises PeerError if that relay is away, or refuses."""


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
        """Load the files if they have changed; return whether they had.

        Raises:
            OSError: as above. The certificate in use stays.
        """
        stamp = _stamp_of(self._files)
        if stamp == self._stamp:
            return False
        # Into a context for trial first: a half-written chain must not replace the one in use.
        load_chain(_server_context(), self._files.certificate, self._files.key)
        load_chain(self.context, self._files.certificate, self._files.key)
        self._stamp = stamp
        return True


class RelayTls:
    """The relay's contexts according to ``config``; its own certificates are renewed in time.

    ``certify`` issues them where another relay has the CA's key: then those that are there are used at first.

    Attributes:
        to_broker: what all connections to the broker are made with; None where that is not over TLS.

    Raises:
        StateError: the CA cannot issue the relay's own certificates.
        OSError: files cannot be used; a key may be readable by others.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        config: RelayConfig,
        ca: OwnAuthority,
        *,
        certify: Certify | None = None,
        now_ms: Callable[[], int],
        random_bytes: Callable[[int], bytes],
        log: FilteringBoundLogger,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._own: list[ServedCertificate | BrokerCertificate] = [
            ServedCertificate(files, ca.servers, name, hosts, now_ms, random_bytes)
            for files, name, hosts in _served(config)
        ]
        self._certify = certify
        self._live: LiveContext | None = None
        self._log = log
        self._sleep = sleep
        self._refreshing = asyncio.Lock()  # the interval and a change of the CA may coincide
        self.to_broker: ssl.SSLContext | None = None
        self.loop = Loop()
        state = config.state
        if config.uses_broker_tls:
            self._own.append(BrokerCertificate(state.broker_client_tls, ca, now_ms, random_bytes))
            # A broker's certificate from before there was a root of servers is of the root of nodes.
            self.to_broker = broker_context(
                state.broker_client_tls, lambda: [*ca.servers.roots(), *ca.roots()], config.broker_root
            )
        for certificate in self._own:
            if certify is None:
                certificate.renew()
            elif not certificate.files.certificate.exists():
                raise AuthorityStateError(
                    f"{certificate.files.certificate} is missing: make another `relay ca backup "
                    "--without-ca-key` on the relay that has the CA's key, once that serves with one"
                )
        if config.tls is not None:
            self._live = LiveContext(config.tls)

    @property
    def served(self) -> ssl.SSLContext | None:
        """What is served with; None where that is not over TLS."""
        return self._live.context if self._live else None

    async def run(self) -> None:
        """Renew and load certificates when they are due, until cancelled."""
        while True:
            self.loop.busy(INTERVAL_S + _ROUND_S)
            await self._sleep(INTERVAL_S)
            await self.refresh()

    async def refresh(self) -> bool:
        """Renew and load now what is due; return whether it succeeded. A failure is logged."""
        async with self._refreshing:
            try:
                for own in self._own:
                    if await self._renewed(own):
                        self._log.info("own certificate issued", file=str(own.files.certificate))
                # Not on a thread: a context must not change during a handshake.
                if self._live is not None and self._live.refresh():
                    self._log.info("certificate loaded")
            except (StateError, PeerError, OSError) as error:
                self._log.error("certificate not renewed", reason=printable(str(error)))
                return False
        return True

    async def _renewed(self, own: ServedCertificate | BrokerCertificate) -> bool:
        # On a thread: issuing waits for the ledger's lock and for the disk.
        if self._certify is None:
            return await asyncio.to_thread(own.renew)
        if (wanted := await asyncio.to_thread(own.due)) is None:
            return False
        issued = await self._certify(own.use, public_key_pem(wanted.public_key))
        await asyncio.to_thread(own.install, wanted, issued)
        return True


def _served(config: RelayConfig) -> Iterator[tuple[TlsFiles, str, Sequence[str]]]:
    """Yield files, name and hosts of what the relay and its own broker serve with."""
    if config.own_root:
        yield config.state.own_tls, RELAY_NAME, [host_of(config.public_url)]
    if config.own_broker is not None and config.broker is not None and config.broker.tls:
        told = config.node_broker or config.broker
        yield config.state.broker_tls, BROKER_NAME, list(dict.fromkeys((told.host, config.broker.host)))


def broker_context(
    shown: TlsFiles, roots: Callable[[], list[str]], broker_root: Path | None
) -> ssl.SSLContext:
    """Return a context for all connections to the broker, which is shown the relay's own certificate.

    The broker is verified by the roots in ``broker_root`` alone; by default by the relay's own ``roots``.
    """

    def make() -> ssl.SSLContext:
        try:
            trusted = broker_root.read_text("ascii", "replace") if broker_root else "".join(roots())
        except StateError as error:
            # paho retries after an OSError only.
            raise TlsFilesError(str(error)) from None
        return client_context(trusted, (shown.certificate, shown.key))

    return FreshContext.of(make)


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Renegotiation costs the server more than the client.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context


def _stamp_of(files: TlsFiles) -> _Stamp:
    facts = (files.certificate.stat(), files.key.stat())
    return tuple((fact.st_ino, fact.st_size, fact.st_mtime_ns) for fact in facts)
