"""HTTP/1 as bytes: a request read from a connection, and a response written for one.

The standard library's server and parser would do, but keep a mebibyte of every node. Must not decide what is
answered.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from io import BufferedIOBase

from kubelet.loopback.pages import LoopbackResponse
from schemas.error_roots import PeerError

_MAX_LINE = 65536
_MAX_FIELDS = 100
_REQUEST_LINE = re.compile(rb"([!-~]+) ([!-~]+) HTTP/([0-9]{1,10})\.[0-9]{1,10}\r?\n")
_FIELD = re.compile(rb"([!#-'*+.^_`|~0-9A-Za-z-]+):([^\r\n\0]*)\r?\n")


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
    return LoopbackRequest(match[1].decode("ascii"), match[2].decode("ascii"), _read_fields(reader))


def _read_fields(reader: BufferedIOBase) -> list[tuple[str, str]]:
    """Read the fields of a header section (RFC 9112 section 5), and the empty line behind it."""
    fields: list[tuple[str, str]] = []
    while (line := reader.readline(_MAX_LINE + 1)) not in {b"\r\n", b"\n"}:
        if len(line) > _MAX_LINE or len(fields) == _MAX_FIELDS:
            raise BadRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        match = _FIELD.fullmatch(line)
        if match is None:
            raise BadRequestError(HTTPStatus.BAD_REQUEST)
        fields.append((match[1].decode("ascii"), match[2].strip(b" \t").decode("latin-1")))
    return fields


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
