"""A scripted OpenID Connect provider over real HTTP on loopback, in which a test plants faults."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from tests.fakes.person import b64

CLIENT_ID = "edge-relay"


def _number(value: int) -> str:
    return b64(value.to_bytes((value.bit_length() + 7) // 8, "big"))


class SigningKey:
    """A key of one of the algorithms, with its JWK."""

    def __init__(self, algorithm: str = "ES256", kid: str = "one") -> None:
        self.algorithm, self.kid = algorithm, kid
        self._key: Any = {
            "RS256": lambda: rsa.generate_private_key(65537, 2048),
            "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
            "EdDSA": ed25519.Ed25519PrivateKey.generate,
        }[algorithm]()

    @property
    def jwk(self) -> dict[str, str]:
        public = self._key.public_key()
        usual = {"kid": self.kid, "use": "sig", "alg": self.algorithm}
        match self.algorithm:
            case "RS256":
                numbers = public.public_numbers()
                return usual | {"kty": "RSA", "n": _number(numbers.n), "e": _number(numbers.e)}
            case "ES256":
                numbers = public.public_numbers()
                point = {name: b64(getattr(numbers, name).to_bytes(32, "big")) for name in ("x", "y")}
                return usual | {"kty": "EC", "crv": "P-256"} | point
            case _:
                return usual | {"kty": "OKP", "crv": "Ed25519", "x": b64(public.public_bytes_raw())}

    def signature(self, data: bytes) -> bytes:
        match self.algorithm:
            case "RS256":
                return bytes(self._key.sign(data, padding.PKCS1v15(), SHA256()))
            case "ES256":
                pair = decode_dss_signature(self._key.sign(data, ec.ECDSA(SHA256())))
                return b"".join(each.to_bytes(32, "big") for each in pair)
            case _:
                return bytes(self._key.sign(data))

    def jwt(self, claims: dict[str, Any], **header: Any) -> str:
        head = {"alg": self.algorithm, "kid": self.kid} | header
        signed = f"{b64(json.dumps(head).encode())}.{b64(json.dumps(claims).encode())}"
        return f"{signed}.{b64(self.signature(signed.encode()))}"


@dataclass
class FakeProvider:
    """The provider. A test changes what it says; ``answers`` replace whole documents, by path.

    Attributes:
        claims: what ID tokens say besides, or instead of, what is right; None removes one.
        id_token: replaces the token.
        asked: the paths of the requests, in order.
    """

    now_ms: Any
    url: str = ""
    key: SigningKey = field(default_factory=SigningKey)
    claims: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)
    id_token: str | None = None
    answers: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    codes: dict[str, dict[str, str]] = field(default_factory=dict)

    def authorize(self, url: str, subject: str = "subject-1") -> str:
        """Sign a person in, as the provider's page would; return the query of the browser's way back."""
        query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        assert query["code_challenge_method"] == "S256"
        code = f"code-{len(self.codes)}"
        self.codes[code] = query | {"sub": subject}
        return f"code={code}&state={query['state']}"

    def token_of(self, form: dict[str, str]) -> str | None:
        """Return the ID token for a code that is redeemed as it must be."""
        asked = self.codes.pop(form.get("code", ""), None)
        verifier = sha256(form.get("code_verifier", "").encode()).digest()
        if asked is None or b64(verifier) != asked["code_challenge"]:
            return None
        if form.get("redirect_uri") != asked["redirect_uri"]:
            return None
        now = self.now_ms() // 1000
        usual = {"iss": self.url, "aud": CLIENT_ID, "sub": asked["sub"], "nonce": asked["nonce"]}
        claims = usual | {"iat": now, "exp": now + 300, "groups": ["people"]} | self.claims
        said = {name: value for name, value in claims.items() if value is not None}
        return self.id_token or self.key.jwt(said, **self.header)

    def answer(self, path: str, form: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        if path in self.answers:
            return self.answers[path]
        if path == "/.well-known/openid-configuration":
            usual = {
                "issuer": self.url,
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
                "jwks_uri": f"{self.url}/jwks",
                "code_challenge_methods_supported": ["S256"],
            }
            return 200, {}, json.dumps(usual | self.metadata).encode()
        if path == "/jwks":
            return 200, {}, json.dumps({"keys": [self.key.jwk]}).encode()
        token = self.token_of(form)
        if token is None:
            return 400, {}, b'{"error":"invalid_grant"}'
        return 200, {}, json.dumps({"id_token": token, "access_token": "x", "token_type": "Bearer"}).encode()


@contextmanager
def fake_provider(now_ms: Any) -> Iterator[FakeProvider]:
    """Serve a provider whose clock is ``now_ms``."""
    provider = FakeProvider(now_ms)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
            provider.asked.append(self.path)
            form = {name: values[0] for name, values in parse_qs(sent).items()}
            status, headers, body = provider.answer(self.path, form)
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - as above

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        provider.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield provider
        finally:
            server.shutdown()
            thread.join()
