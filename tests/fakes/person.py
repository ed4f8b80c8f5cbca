"""A person with a browser and a passkey, in software: the browser follows our pages, and runs no script."""

import json
import os
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import unescape
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from fido2 import cbor
from fido2.cose import ES256

_PRESENT_VERIFIED = 0x05
_ATTESTED = 0x40


def b64(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def unb64(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


class Authenticator:
    """One passkey. ``flags`` are those of its data: present and verified, unless a test forges others."""

    def __init__(self, origin: str, flags: int = _PRESENT_VERIFIED) -> None:
        self.origin, self.flags = origin, flags
        self.rp_id = urlsplit(origin).hostname or ""
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.id = os.urandom(32)
        self.user = b""

    def _client_data(self, kind: str, challenge: str) -> bytes:
        return json.dumps({"type": kind, "challenge": challenge, "origin": self.origin}).encode()

    def _data(self, flags: int, more: bytes = b"") -> bytes:
        return sha256(self.rp_id.encode()).digest() + bytes([self.flags | flags]) + bytes(4) + more

    def create(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a browser sends for a passkey that was made."""
        wanted = options["publicKey"]
        self.user = unb64(wanted["user"]["id"])
        public = ES256.from_cryptography_key(self.key.public_key())  # type: ignore[no-untyped-call]
        attested = bytes(16) + len(self.id).to_bytes(2, "big") + self.id + cbor.encode(dict(public))
        attestation = {"fmt": "none", "attStmt": {}, "authData": self._data(_ATTESTED, attested)}
        client_data = self._client_data("webauthn.create", wanted["challenge"])
        response = {"clientDataJSON": b64(client_data), "attestationObject": b64(cbor.encode(attestation))}
        return {"id": b64(self.id), "rawId": b64(self.id), "type": "public-key", "response": response}

    def get(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a browser sends for a passkey that was used."""
        client_data = self._client_data("webauthn.get", options["publicKey"]["challenge"])
        data = self._data(0)
        signature = self.key.sign(data + sha256(client_data).digest(), ec.ECDSA(SHA256()))
        response = {
            "clientDataJSON": b64(client_data),
            "authenticatorData": b64(data),
            "signature": b64(signature),
            "userHandle": b64(self.user),
        }
        return {"id": b64(self.id), "rawId": b64(self.id), "type": "public-key", "response": response}


class Browser:
    """A browser at the relay: it keeps cookies, and sends the Origin of the page that it is on."""

    def __init__(self, http: httpx2.AsyncClient, origin: str) -> None:
        self.http, self.origin = http, origin
        self.authenticator = Authenticator(origin)
        self.cookies: dict[str, str] = {}

    def _cookie(self) -> dict[str, str]:
        return (
            {"cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}
            if self.cookies
            else {}
        )

    async def _sent(self, method: str, path: str, **options: Any) -> httpx2.Response:
        headers = {"accept": "text/html", **self._cookie(), **options.pop("headers", {})}
        answer = await self.http.request(method, path, headers=headers, **options)
        self.http.cookies.clear()  # the library's own, which all browsers of a test would share
        for line in answer.headers.get_list("set-cookie"):
            name, _, value = line.partition(";")[0].partition("=")
            self.cookies[name] = value
            if "Max-Age=0" in line:
                del self.cookies[name]
        return answer

    async def get(self, path: str) -> httpx2.Response:
        return await self._sent("GET", path)

    async def post_json(self, path: str, value: object, **headers: str) -> httpx2.Response:
        return await self._sent("POST", path, json=value, headers={"origin": self.origin, **headers})

    async def post_form(self, path: str, form: Mapping[str, Any], **headers: str) -> httpx2.Response:
        return await self._sent("POST", path, data=form, headers={"origin": self.origin, **headers})

    async def accept_invitation(self, link: str) -> httpx2.Response:
        secret = link.partition("#")[2]
        assert (await self.get("/invitation")).status_code == 200
        options = await self.post_json("/invitation/options", {"link": secret})
        if options.status_code != 200:
            return options
        credential = self.authenticator.create(options.json())
        return await self.post_json("/invitation/passkey", {"link": secret, "credential": credential})

    async def sign_in(self) -> httpx2.Response:
        options = await self.post_json("/sign-in/options", {})
        if options.status_code != 200:
            return options
        return await self.post_json(
            "/sign-in/passkey", {"credential": self.authenticator.get(options.json())}
        )

    async def allow(self, url: str, **form: Any) -> httpx2.Response:
        """Open an authorization's URL, and answer its page; ``form`` is what differs from the usual."""
        path = url.removeprefix(self.origin)
        page = await self.get(path)
        if page.status_code != 200 or 'name="form"' not in page.text:
            return page
        usual = {
            "form": form_value(page.text),
            "choice": "look_without_logs",
            "lifetime": "month",
            "decision": "allow",
        }
        action = re.search(r'<form method="post" action="([^"]*)"', page.text)
        assert action is not None
        return await self.post_form(unescape(action[1]), usual | form)


def form_value(page: str) -> str:
    """Return what proves that a form was shown."""
    found = re.search(r'name="form" value="([^"]+)"', page)
    assert found is not None
    return found[1]


def answered(response: httpx2.Response) -> dict[str, str]:
    """Return the members of an authorization's answer, which was sent by a redirect."""
    assert response.status_code == 303, response.text
    return {
        name: values[0] for name, values in parse_qs(urlsplit(response.headers["location"]).query).items()
    }
