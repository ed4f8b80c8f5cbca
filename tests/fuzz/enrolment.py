"""Targets: what a relay answers to a node that enrols or renews, on the node's side.

The node enrols over the memory loop. Of the two answers, those that begin with ``HTTP/`` are sent as they
are; of others the relay of the token makes good answers, which are true but for what they say.
"""

import asyncio
import shutil
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from ssl import PROTOCOL_TLS_CLIENT, SSLContext
from typing import Any, Final
from unittest.mock import create_autospec, patch
from urllib.parse import urlsplit

import kubelet.identity.enrolment
from kubelet.identity.enrolment import ClockError, Enroller, EnrolmentError
from kubelet.identity.http_exchange import NoAnswerError, _open_tunnel
from kubelet.identity.provisioning import Issued, create_identity, install_renewed
from relay.pki.issuing import issue_leaf
from schemas.canonical import jcs
from schemas.certificates import read_csr
from schemas.enrolment import RELAY, JoinToken, proven
from schemas.identity import certificates_in, first_certificate_in
from schemas.identity_files import IdentityFiles, IdentityFilesError
from schemas.keys import base64url
from schemas.registry import SchemaRegistry
from schemas.strict_json import StrictJsonError, loads
from tests.fakes.signer import NOW_MS, TENANT
from tests.fuzz import samples
from tests.fuzz.live import kept
from tests.fuzz.memory_loop import HERE
from tests.fuzz.scratch import directory
from tests.fuzz.target import Target, tried

_RELAY: Final = (HERE, 8701)
_URL: Final = f"http://{HERE}:8701"
_NONCE: Final = b"n" * 32
_BOUND_S: Final = 30
_TOKEN: Final = JoinToken(
    "0" * 26, samples.JOIN_KEY, sha256(first_certificate_in(samples.CA.root_pem)).digest()
)


@cache
def _fresh() -> Path:
    """Return the directory of a node that is not enrolled, which is copied for each input."""
    path = directory() / "fresh-node"
    path.mkdir(mode=0o700)
    create_identity(IdentityFiles(path), NOW_MS, lambda count: b"\x07" * count)
    return path


def _node() -> IdentityFiles:
    path = directory() / "node"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(_fresh(), path)
    return IdentityFiles(path)


@cache
def _issued() -> dict[str, Any]:
    node_id, public_key = read_csr((_fresh() / IdentityFiles(Path()).csr).read_text("ascii"))
    leaf = issue_leaf(
        samples.CA.root_pem,
        samples.CA.key,
        node_id=node_id,
        tenant=TENANT,
        public_key=public_key,
        now_ms=NOW_MS,
        valid_days=90,
        serial=7,
    )
    return {"certificate": leaf, "roots": samples.CA.root_pem}


def enrolment_answer(data: bytes) -> None:
    """The node is enrolled with what the token's relay has proven, or not at all, and tells why in a line."""
    # What takes as long as a hundred inputs: the documents, and the machine's roots, unused by a plain URL.
    node = kubelet.identity.enrolment
    with (
        patch.object(node, "client_context", lambda *_: SSLContext(PROTOCOL_TLS_CLIENT)),
        patch.object(node, "SchemaRegistry", _registry),
    ):
        kept().run(_enrol(*data.partition(b"\0")[::2]))


@cache
def _registry() -> SchemaRegistry:
    return SchemaRegistry()


async def _enrol(roots: bytes, message: bytes) -> None:
    files = _node()
    enroller = Enroller(
        files=files,
        token=_TOKEN,
        relay_url=_URL,
        plain_allowed=True,
        now_ms=lambda: NOW_MS,
        random_bytes=lambda _: _NONCE,
    )
    answering = asyncio.create_task(_answer(_http(roots), _http(_proven(message))))
    try:
        async with asyncio.timeout(_BOUND_S):
            enrolled = await enroller.run()
    except (EnrolmentError, ClockError, NoAnswerError, IdentityFilesError) as error:
        text = str(error)
        assert text.isprintable(), ascii(text)
        assert base64url(samples.JOIN_KEY) not in text
    else:
        own = files.read()
        assert enrolled.identity.node_id == own.node_id
        assert enrolled.identity.public_key == bytes(own.key.verify_key)
    finally:
        answering.cancel()
        await asyncio.wait([answering])


async def _answer(*answers: bytes) -> None:
    """Answer one connection after the other."""
    for answer in answers:
        reader, writer = await kept().loop.accept(_RELAY)
        # All of the request: what is closed with data unread resets the connection.
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0)
        writer.write(answer)
        writer.close()


def _http(body: bytes) -> bytes:
    if body.startswith(b"HTTP/"):
        return body
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def _proven(message: bytes) -> bytes:
    """Return ``message`` with the proof of the token's relay, if it is an object."""
    try:
        members = loads(message, max_bytes=1 << 16)
        answer = {**members, "nonce": base64url(_NONCE)} if isinstance(members, Mapping) else None
        return message if answer is None else jcs(proven(answer, samples.JOIN_KEY, RELAY))
    except (StrictJsonError, ValueError):
        return message


def renewal(data: bytes) -> None:
    """A renewed leaf is the node's own, of a root that it trusts or one endorses, or not installed."""
    files = _node()
    files.install(_issued()["certificate"], samples.CA.root_pem)
    before = files.read()
    try:
        issued = Issued(**loads(data, max_bytes=1 << 16))
    except (StrictJsonError, TypeError):
        return  # what does not fit the frame's document is not given to it
    if not all(isinstance(text, str) for text in (issued.certificate, issued.roots, issued.server_roots)):
        return
    tried(lambda: install_renewed(files, issued, NOW_MS), IdentityFilesError)
    after = files.read()
    assert after.root_pem is not None
    assert set(certificates_in(after.root_pem)) <= {*certificates_in(samples.CA.root_pem), samples.NEW_ROOT}
    assert (after.node_id, bytes(after.key)) == (before.node_id, bytes(before.key))


def proxy_answer(data: bytes) -> None:
    """A tunnel is open after a 200 alone, and what else a proxy answers is one line."""

    async def opened() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        writer = create_autospec(asyncio.StreamWriter, instance=True)
        await _open_tunnel(reader, writer, "relay.example:443", urlsplit("http://proxy.example:3128"))

    try:
        kept().run(opened())
    except NoAnswerError as error:
        text = str(error)
        assert text.isprintable()
    else:
        assert data.split(b" ", 2)[1] == b"200"


def _message() -> bytes:
    return samples.compact(
        {
            **_issued(),
            "relay_url": _URL,
            "broker": "mqtt://127.0.0.1:1883",
            "own_root": False,
            "server_time_ms": NOW_MS,
        }
    )


_ROOTS: Final = samples.CA.root_pem.encode()
TARGETS: Final = {
    "proxy_answer": Target(
        proxy_answer,
        (
            b"HTTP/1.1 200 Connection established\r\n\r\n",
            b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n",
        ),
    ),
    "enrolment_answer": Target(
        enrolment_answer,
        (
            _ROOTS + b"\0" + _message(),
            b"HTTP/1.1 403 Forbidden\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\n",
            _ROOTS + b"\0HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{}",
        ),
    ),
    "renewal": Target(
        renewal,
        (samples.compact(_issued()), samples.compact({**_issued(), "endorsement": samples.ENDORSEMENT})),
    ),
}
