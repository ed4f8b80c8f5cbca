"""What a log may hold of an exception: where it was raised, and a bounded part of its message.

An exception's message can hold bytes from outside, and a frame's variables secrets: messages are escaped and
cut, variables are left out. The same fault may be hit a thousand times a second: a place is reported once a
minute. Why a connection was not made has a reason for its operator. Must not write anything, nor connect.
"""

import os
import re
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from schemas.error_roots import EdgeError
from schemas.text import printable

INTERVAL_S = 60.0
_MAX_PLACES = 256
_MAX_MESSAGE = 200
_MAX_FRAMES = 16
_MAX_CHAIN = 4
_MAX_READ = 4096
_OPAQUE = re.compile(r"[A-Za-z0-9_+=-]{32,}")


class FailedError(EdgeError):
    """The program has ended by a fault. The text is its summary; the traceback is in the log."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(summary(first_of(error)))


def traceback_text(error: BaseException) -> str:
    """Return the traceback of ``error`` and of what it came from, as several lines of printable ASCII."""
    return "\n".join(line for each in list(_chain(error))[:_MAX_CHAIN] for line in _lines(each))


def summary(error: BaseException) -> str:
    """Return the type of ``error`` and the beginning of its message, in one line."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - an exception of others may have a broken __str__
        message = "(its message cannot be read)"
    message = without_secrets(message)
    name = type(error).__qualname__
    return printable(f"{name}: {message}" if message else name, _MAX_MESSAGE)


def without_secrets(text: str) -> str:
    """Return the beginning of ``text`` without long opaque words, as keys, tokens and session ids are."""
    return _OPAQUE.sub("(left out)", text[:_MAX_READ])


def place_of(error: BaseException) -> str:
    """Return where ``error`` was raised, and its type: what is the same for each time that it happens."""
    error = first_of(error)
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
    return f"{where} {type(error).__qualname__}"


def first_of(error: BaseException) -> BaseException:
    """Return what went wrong first in the task groups that ``error`` came through."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, then what it came from and what it is a group of."""
    seen: set[int] = set()
    left = [error]
    while left:
        each = left.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, BaseExceptionGroup):
            left.extend(each.exceptions)
        origin = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
        if origin is not None:
            left.append(origin)


def _lines(error: BaseException) -> Iterator[str]:
    yield summary(error)
    for frame in reversed(traceback.extract_tb(error.__traceback__, limit=-_MAX_FRAMES)):
        yield printable(f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}")


@dataclass(slots=True)
class _Place:
    """When faults of one place were reported last, and how many were suppressed since."""

    reported_s: float
    suppressed: int = 0


class OncePerPlace:
    """Limits reports to one a minute from each place in the code. May be called from any thread."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._places: dict[str, _Place] = {}
        self._lock = threading.Lock()

    def suppressed_before(self, place: str, now_s: float) -> int | None:
        """Return how many from ``place`` were suppressed since the last one; None if this is one of them."""
        with self._lock:
            known = self._places.get(place)
            if known is not None and now_s - known.reported_s < self._interval_s:
                known.suppressed += 1
                return None
            if known is None and len(self._places) >= _MAX_PLACES:
                # Places are lines of code: there are this many only if they are invented.
                del self._places[min(self._places, key=lambda each: self._places[each].reported_s)]
            self._places[place] = _Place(now_s)
            return known.suppressed if known is not None else 0


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


def connection_advice(
    error: BaseException, root: Path | None = None, *, takes_root: bool = True
) -> str | None:
    """Return what to change so that the connection can be made, in one sentence; None if that is not known.

    ``root``: the file of the root that the server's certificate was verified by, where one was named;
    ``takes_root``: whether one can be.
    """
    import ssl  # noqa: PLC0415 - as above

    fault = connection_fault(error)
    if speaks_no_tls(fault):
        return "Check the port; or write http:// in the URL, if the server works without TLS."
    if isinstance(fault, ssl.SSLCertVerificationError):
        return _trust_advice(fault, root, takes_root=takes_root)
    return None


def no_http_reason(url: str) -> str:
    """Return why a server at ``url`` is not used that hung up without an answer, or gave one of no HTTP."""
    reason = "what answers does not speak HTTP as it should"
    return (
        f"{reason}: write https:// in the URL, if it works with TLS" if url.startswith("http://") else reason
    )


def _trust_advice(error: "ssl.SSLCertVerificationError", root: Path | None, *, takes_root: bool) -> str:
    advice = _OF_THIS_CERTIFICATE.get(error.verify_code)
    if advice is not None:
        return f"{advice}."
    if not takes_root:
        return "Sign-in needs a public certificate, or one whose root is in this machine's store."
    if root is None:
        return f"Name the root of its certificate with --root: {_WHERE_THE_ROOT_IS}."
    return f"{printable(str(root))} is not the root of its certificate: {_WHERE_THE_ROOT_IS}."
