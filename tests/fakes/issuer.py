"""An outside issuer of agents' tokens: real keys, real tokens, and its key set on a real web server.

What the server says is a test's to choose, byte by byte; it counts who asked.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from nacl.signing import SigningKey

from relay.auth.agent_tokens import Authenticator, ExternalIssuer
from relay.auth.issuer_keys import IssuerKeys, JwksReader, JwksSource
from relay.observability.metrics import Metrics
from relay.state.tokens import key_id
from schemas.addresses import mcp_urls
from schemas.keys import base64url
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.tokens import AGENT_REF, EXTERNAL_AGENT_REF, EXTERNAL_HEADER_REF, TokenVerifier
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.pauses import Pauses
from tests.fakes.signer import ABSENT, NOW_MS, key_named

BOUND_S = 30
PUBLIC_URL = "https://relay.example"
AUDIENCE = f"{PUBLIC_URL}/mcp"
ISSUER = "https://issuer.example/realms/edge"
NOW_S = NOW_MS // 1000
KID = "2026-11:signing/1"
KEY = key_named("the outside issuer's key")
OUR_KEY = key_named("the relay's token key")
OUR_KID = key_id(bytes(OUR_KEY.verify_key))
CLAIMS: Mapping[str, Any] = {
    "iss": ISSUER,
    "aud": [AUDIENCE, "https://issuer.example/userinfo"],
    "sub": "auth0|agent one",
    "tenant": "acme",
    "scope": "openid tools:call:read_only",
    "iat": NOW_S,
    "nbf": NOW_S,
    "exp": NOW_S + 600,
    "jti": "onrtac:5f0e1a/2=",
    "token_class": "agent_runtime",
    "azp": "a-client",
    "realm_access": {"roles": ["user"]},
}


def jwk(key: SigningKey = KEY, kid: object = KID, **changes: Any) -> dict[str, Any]:
    """Return the public half of ``key`` as an issuer publishes it."""
    members = {
        "kty": "OKP",
        "crv": "Ed25519",
        "use": "sig",
        "alg": "EdDSA",
        "kid": kid,
        "x": base64url(bytes(key.verify_key)),
    }
    return {name: value for name, value in {**members, **changes}.items() if value is not ABSENT}


def outside_token(
    key: SigningKey = KEY, kid: object = KID, header: Mapping[str, Any] | None = None, **claims: Any
) -> str:
    """Return a token of the issuer, with members of ``header`` and ``claims`` replaced."""
    head = {"alg": "EdDSA", "typ": "at+jwt", "kid": kid, **(header or {})}
    body = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not ABSENT}
    signing_input = ".".join(
        base64url(json.dumps({name: value for name, value in part.items() if value is not ABSENT}).encode())
        for part in (head, body)
    )
    return f"{signing_input}.{base64url(key.sign(signing_input.encode()).signature)}"


class IssuerServer:
    """Answers every request with the same bytes.

    Attributes:
        answer: those bytes, a whole HTTP answer or a part of one.
        requests: the heads of the requests that came.
        open: while it is not set, no request is answered.
        finish: whether a connection ends with the answer.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.answer = b""
        self.requests: list[bytes] = []
        self.finish = True
        self.open = asyncio.Event()
        self.open.set()
        self._ended = asyncio.Event()
        self._came = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def running(cls, tls: ssl.SSLContext | None = None) -> AsyncIterator["IssuerServer"]:
        """Hold a server on a free port of loopback."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server._serve(reader, writer)

        listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
        port = listening.sockets[0].getsockname()[1]
        server = cls(f"{'https' if tls else 'http'}://127.0.0.1:{port}/keys")
        server.publish(jwk())
        try:
            yield server
        finally:
            server.open.set()
            server._ended.set()
            listening.close()
            await listening.wait_closed()

    def publish(self, *keys: object) -> None:
        """Serve the set of ``keys`` from now on."""
        self.say("200 OK", json.dumps({"keys": keys}).encode())

    def say(self, status: str, body: bytes, *headers: str) -> None:
        """Serve this from now on."""
        head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
        self.answer = "\r\n".join([*head, "", ""]).encode() + body

    async def asked(self, count: int) -> None:
        """Wait until ``count`` requests have come."""
        async with asyncio.timeout(BOUND_S):
            while len(self.requests) < count:
                self._came.clear()
                await self._came.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            self._came.set()
            await self.open.wait()
            writer.write(self.answer)
            await writer.drain()
            if not self.finish:
                await self._ended.wait()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # a client that closed is in the count, or sent no request
        finally:
            writer.close()


class TwoIssuers:
    """A relay's authenticator that accepts the tokens of an outside issuer besides its own."""

    def __init__(self, registry: SchemaRegistry, server: IssuerServer) -> None:
        self.server = server
        self.clock = FakeClock(NOW_MS)
        self.pauses = Pauses()
        self.metrics = Metrics()
        self.lines = LogLines()
        ours = {OUR_KID: bytes(OUR_KEY.verify_key)}
        self.keys = IssuerKeys(
            fetch=JwksSource(server.url).fetch,
            read=JwksReader(registry, ours).keys,
            monotonic=lambda: self.clock() / 1000,
            metrics=self.metrics,
            log=make_logger("relay", self.lines),
            sleep=self.pauses.sleep,
        )
        self.authenticator = Authenticator(
            TokenVerifier(registry, AGENT_REF),
            ours,
            PUBLIC_URL,
            mcp_urls(PUBLIC_URL),
            self.clock,
            ExternalIssuer(
                ISSUER, TokenVerifier(registry, EXTERNAL_AGENT_REF, EXTERNAL_HEADER_REF), self.keys
            ),
        )

    @classmethod
    @asynccontextmanager
    async def running(cls, registry: SchemaRegistry) -> AsyncIterator["TwoIssuers"]:
        """Hold such a relay, and the issuer's server."""
        async with IssuerServer.running() as server:
            yield cls(registry, server)

    @property
    def fetches(self) -> int:
        """How often the set was asked for."""
        return len(self.server.requests)
