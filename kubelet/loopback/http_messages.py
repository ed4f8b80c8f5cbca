"""HTTP/1 as bytes: a request read from a connection, and a response written for one.

The standard library's server would do, but keeps half a mebibyte of every node. Must not decide what is
answered.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from io import BufferedIOBase

from kubelet.loopback.pages import LoopbackResponse
from schemas.error_roots import PeerError

_MAX_LINE = 65536
_REQUEST_LINE = re.compile(rb"([!-~]+) ([!-~]+) HTTP/([0-9]{1,10})\.[0-9]{1,10}\r?\n")


class BadRequestError(PeerError):
    """A request that cannot be parsed; ``status`` is what to answer."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True)
class LoopbackRequest:
    """One request. All of it is of foreign origin."""

    method: str
    target: str
    headers: Sequence[tuple[str, str]]


def read_request(reader: BufferedIOBase) -> LoopbackRequest | None:
    """Read the head of a request; None where the connection was closed before its first byte.

    Raises:
        BadRequestError: this is not a request, or it is too long.
    """
    line = reader.readline(_MAX_LINE + 1)
    if not line:
        return None
    if len(line) > _MAX_LINE:
        raise BadRequestError(HTTPStatus.REQUEST_URI_TOO_LONG)
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise BadRequestError(HTTPStatus.BAD_REQUEST)
    if int(match[3]) > 1:
        raise BadRequestError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    try:
        headers = parse_headers(reader)
    except HTTPException:
        raise BadRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) from None
    return LoopbackRequest(match[1].decode("ascii"), match[2].decode("ascii"), headers.items())


def encode_response(response: LoopbackResponse, *, with_body: bool) -> bytes:
    """Return the bytes of ``response``, which end the connection; no header names a version of anything."""
    headers = {
        "Server": "edge-kubelet",
        "Date": formatdate(usegmt=True),
        **response.headers,
        "Cache-Control": "no-store",
    }
    if response.status is not HTTPStatus.NOT_MODIFIED:
        headers |= {
            "Content-Type": headers.get("Content-Type", "application/json"),
            "X-Content-Type-Options": "nosniff",
            "Content-Length": str(len(response.body)),
        }
    lines = [f"HTTP/1.0 {response.status.value} {response.status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join(lines) + "\r\n\r\n"
    return head.encode("ascii") + (response.body if with_body else b"")
