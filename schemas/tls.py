"""What both programs require of the other end of a TLS connection.

Version 1.2 or newer, a certificate for the very name or address that was asked for, from a root that is
named, or else one that this machine trusts. Must not connect, and must not read the files of certificates
by itself: when a context is made is when they are looked at.
"""

import os
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from schemas.error_roots import OperatorError
from schemas.files import check_loadable, read_given, read_named_secret

_ROOTS_VARIABLE = "SSL_CERT_FILE"


class TlsFilesError(OperatorError, OSError):
    """The content of files cannot be used for TLS; the text states why."""


def client_context(
    roots_pem: str | None = None, shown: tuple[Path, Path] | None = None, *, system_too: bool = False
) -> ssl.SSLContext:
    """Return a context that believes servers of ``roots_pem`` alone, by default those this machine trusts.

    ``shown``: the files of the certificate that is shown to the server, and of its key. ``system_too``: those
    that this machine trusts are believed besides.

    Raises:
        OSError: the roots hold no certificate, or the files cannot be used, that of SSL_CERT_FILE too.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # it demands a certificate, and the right name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.hostname_checks_common_name = False
    if roots_pem is None or system_too:
        _load_machine_roots(context)
    if roots_pem is not None:
        try:
            context.load_verify_locations(cadata=roots_pem)
        except (ValueError, TypeError, ssl.SSLError):  # no text, none of ASCII, or none of a certificate
            raise TlsFilesError("the root holds no certificate") from None
    if shown is not None:
        load_chain(context, *shown)
    return context


def read_root(file: Path) -> str:
    """Return the text of a file that the operator named, with the root that a server is verified by.

    Raises:
        OSError: it cannot be read, or holds no certificate; the text names it.
    """
    text = read_given(file).decode("utf-8", "replace")
    try:
        client_context(text)
    except TlsFilesError:
        raise TlsFilesError(f"{file} holds no certificate in PEM: name the root of the server") from None
    return text


def _load_machine_roots(context: ssl.SSLContext) -> None:
    named = os.environ.get(_ROOTS_VARIABLE)
    if named:
        with suppress(FileNotFoundError):
            check_loadable(Path(named))
    context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if not named or context.cert_store_stats()["x509"]:
        return
    # Loaded again for the reason: the library says nothing of a file that is missing or holds no certificate.
    try:
        context.load_verify_locations(cafile=named)
    except ssl.SSLError:
        raise TlsFilesError(f"{_ROOTS_VARIABLE} names {named}, which holds no certificate") from None
    except OSError as error:
        raise TlsFilesError(f"{_ROOTS_VARIABLE} names {named}: {error.strerror}") from None


def load_chain(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Let ``context`` show ``certificate``, with those above it in the same file.

    Raises:
        OSError: the files cannot be used; the key may be another user's, or readable by others. There is
            no prompt for an encrypted key's password: a daemon has no terminal.
    """
    for file in (certificate, key):
        check_loadable(file)
    try:
        read_named_secret(key)
    except UnicodeDecodeError:
        raise TlsFilesError(f"{key} is not PEM") from None
    try:
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError:
        # Without the library's text, which names a line of its own source.
        raise TlsFilesError(f"{certificate} and {key} are not a certificate and its key, in PEM") from None


class FreshContext(ssl.SSLContext):
    """A context that is created again for every connection, from the files as they are then.

    For a client that keeps one context while leaves are renewed and roots change.
    """

    _make: Callable[[], ssl.SSLContext]

    @classmethod
    def of(cls, make: Callable[[], ssl.SSLContext]) -> "FreshContext":
        context = cls(ssl.PROTOCOL_TLS_CLIENT)
        context._make = make
        return context

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        """Wrap a socket in a context of this moment.

        Raises:
            OSError: there is none now.
        """
        return self._make().wrap_socket(*arguments, **options)
