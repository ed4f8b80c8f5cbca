"""The pages that a node serves to its operator over HTTP: which response a request gets, without a socket.

Other programs of the machine, and web pages in its browser, can reach the port where these are served: so
nothing here changes anything, nothing secret is shown, a request made under a foreign name (DNS rebinding) or
by a foreign page is refused, and no text of a request is ever returned or logged.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeAlias

from schemas.health import Health

MANIFEST_PATH = "/.well-known/mcp.json"
HEALTH_PATH = "/healthz"
READINESS_PATH = "/readyz"
METRICS_PATH = "/metrics"

# Any port: an operator may come through a tunnel that has another.
_HOST = r"(?:127\.0\.0\.1|localhost|\[::1\])(?::[0-9]{1,5})?"
_OUR_HOST = re.compile(_HOST, re.IGNORECASE)
_OUR_ORIGIN = re.compile(f"https?://{_HOST}", re.IGNORECASE)

_Fields: TypeAlias = dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether calls can reach this node, and the health of each subsystem."""

    ready: bool
    subsystems: Mapping[str, Health]


@dataclass(frozen=True, slots=True)
class LoopbackResponse:
    """One response. ``body`` is what GET sends, and what HEAD only measures."""

    status: HTTPStatus
    body: bytes
    headers: Mapping[str, str]


class Pages:
    """The pages, made for each request from the state that callables return.

    ``manifest`` returns the wire bytes last published and their ETag, or None before the first; ``metrics``
    a text in Prometheus' format. All are called from the server's threads.
    """

    def __init__(
        self,
        manifest: Callable[[], tuple[bytes, str] | None],
        readiness: Callable[[], Readiness],
        metrics: Callable[[], str] = str,
    ) -> None:
        self._manifest = manifest
        self._readiness = readiness
        self._metrics = metrics
        self._pages: Mapping[str, Callable[[_Fields], LoopbackResponse]] = {
            MANIFEST_PATH: self._manifest_page,
            HEALTH_PATH: self._healthz,
            READINESS_PATH: self._readyz,
            METRICS_PATH: self._metrics_page,
        }

    def respond(self, method: str, target: str, headers: Iterable[tuple[str, str]]) -> LoopbackResponse:
        """Return the response to a request; ``headers`` are its fields as received."""
        fields: _Fields = {}
        for name, value in headers:
            fields.setdefault(name.lower(), []).append(value.strip())
        if (status := _foreign_origin(fields)) is not None:
            return refusal(status)
        page = self._pages.get(target.partition("?")[0])
        if page is None:
            return refusal(HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            return refusal(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})
        return page(fields)

    def _healthz(self, _fields: _Fields) -> LoopbackResponse:
        dead = [name for name, health in self._readiness().subsystems.items() if not health.live]
        if dead:
            return _json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "stalled", "stalled": dead})
        return _json(HTTPStatus.OK, {"status": "ok"})

    def _readyz(self, _fields: _Fields) -> LoopbackResponse:
        readiness = self._readiness()
        status = HTTPStatus.OK if readiness.ready else HTTPStatus.SERVICE_UNAVAILABLE
        shown = {name: health.to_json() for name, health in readiness.subsystems.items()}
        return _json(status, {"ready": readiness.ready, "subsystems": shown})

    def _metrics_page(self, _fields: _Fields) -> LoopbackResponse:
        headers = {"Content-Type": "text/plain; version=0.0.4"}
        return LoopbackResponse(HTTPStatus.OK, self._metrics().encode("ascii"), headers)

    def _manifest_page(self, fields: _Fields) -> LoopbackResponse:
        published = self._manifest()
        if published is None:
            return _json(HTTPStatus.NOT_FOUND, {"error": "no manifest has been published yet"})
        wire, etag = published
        headers = {"ETag": f'"{etag}"'}
        etags = ",".join(fields.get("if-none-match", []))
        known = {tag.strip().removeprefix("W/") for tag in etags.split(",")}
        if known & {"*", headers["ETag"]}:
            return LoopbackResponse(HTTPStatus.NOT_MODIFIED, b"", headers)
        return LoopbackResponse(HTTPStatus.OK, wire, headers)


def _foreign_origin(fields: _Fields) -> HTTPStatus | None:
    hosts = fields.get("host", [])
    if len(hosts) != 1 or not _OUR_HOST.fullmatch(hosts[0]):
        return HTTPStatus.MISDIRECTED_REQUEST
    if not all(_OUR_ORIGIN.fullmatch(origin) for origin in fields.get("origin", [])):
        return HTTPStatus.FORBIDDEN
    return None


def refusal(status: HTTPStatus, headers: Mapping[str, str] | None = None) -> LoopbackResponse:
    """Return a response with ``status`` and nothing of the request."""
    return _json(status, {"error": status.phrase}, headers)


def _json(
    status: HTTPStatus, value: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> LoopbackResponse:
    return LoopbackResponse(status, json.dumps(value).encode("ascii") + b"\n", headers or {})
