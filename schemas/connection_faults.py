"""Why a connection was not made: what the system or TLS has reported, and what its operator can do about it.

Must not connect.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from schemas.faults import first_of, without_secrets
from schemas.text import printable

if TYPE_CHECKING:
    import ssl

_MAX_REASON = 200
# How OpenSSL calls what is no record of TLS: of HTTP, or of another protocol.
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL", "HTTP_REQUEST"})
_WHERE_THE_ROOT_IS = "of a relay with --tls-own, `relay ca roots --servers --pem` on its machine prints it"
_OF_THIS_CERTIFICATE: Mapping[int, str] = {  # by X509_V_ERR_... of OpenSSL
    9: "Set this machine's clock",
    10: "Renew the server's certificate, or set this machine's clock",
    62: "Use a name that the certificate is for",
    64: "Use a name or address that the certificate is for",
}


def connection_reason(error: BaseException) -> str:
    """Return why a connection was not made, in the words of the system or of TLS, as printable ASCII."""
    return printable(without_secrets(_reported(connection_fault(error))), _MAX_REASON)


def connection_fault(error: BaseException) -> BaseException:
    """Return what the system or TLS has reported; libraries wrap it in errors that say less."""
    import ssl  # noqa: PLC0415 - a command that neither fails nor connects does without it

    waiting = (ssl.SSLWantReadError, ssl.SSLWantWriteError)  # no fault: what failed came after it
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        cause = first_of(cause).__cause__ or first_of(cause).__context__
    faults = (each for each in map(first_of, reversed(seen)) if not isinstance(each, waiting))
    return next((each for each in faults if isinstance(each, OSError)), error)


def _reported(error: BaseException) -> str:
    import ssl  # noqa: PLC0415 - as above

    if speaks_no_tls(error):
        return "what answers does not speak TLS"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not trusted: {error.verify_message}"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno is not None:
        # asyncio's text repeats the address. A number below zero is one of name resolution.
        return os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__qualname__


def speaks_no_tls(error: BaseException) -> bool:
    """Return whether ``error`` is that the other end answered, and not in TLS."""
    return isinstance(error, OSError) and getattr(error, "reason", None) in _NO_TLS


def connection_advice(error: BaseException, root: Path | None = None) -> str | None:
    """Return what to change so that the connection can be made, in one sentence; None if that is not known.

    ``root``: the file of the root that the server's certificate was verified by, where one was named.
    """
    import ssl  # noqa: PLC0415 - as above

    fault = connection_fault(error)
    if speaks_no_tls(fault):
        return "Check the port; or write http:// in the URL, if the server works without TLS."
    if isinstance(fault, ssl.SSLCertVerificationError):
        return _trust_advice(fault, root)
    return None


def no_http_reason(url: str) -> str:
    """Return why a server at ``url`` is not used that hung up without an answer, or gave one of no HTTP."""
    reason = "what answers does not speak HTTP as it should"
    return (
        f"{reason}: write https:// in the URL, if it works with TLS" if url.startswith("http://") else reason
    )


def _trust_advice(error: "ssl.SSLCertVerificationError", root: Path | None) -> str:
    advice = _OF_THIS_CERTIFICATE.get(error.verify_code)
    if advice is not None:
        return f"{advice}."
    if root is None:
        return f"Name the root of its certificate with --root: {_WHERE_THE_ROOT_IS}."
    return f"{printable(str(root))} is not the root of its certificate: {_WHERE_THE_ROOT_IS}."
