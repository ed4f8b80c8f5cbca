"""What sign-in takes without the person: from the page of consent to a token, a refresh, and a call after it.

The reference is what a client's user would not notice, and for a call one with a token that was pasted.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx2

from bench.results import Figure
from relay.sign_in.authorization import challenge_of
from tests.fakes.person import Browser
from tests.fakes.small_fleet import SmallFleet, small_fleet

_ROUNDS = 30
_CALLS = 400
_BLOCKS = 8
_REDIRECT = "https://client.example/callback"
_VERIFIER = "v" * 43
_UNNOTICED_MS = 100.0


async def measure_sign_in() -> list[Figure]:
    """Return ``sign_in_ms``, ``token_refresh_ms`` and ``signed_in_call_ms``, medians."""
    with tempfile.TemporaryDirectory() as directory:
        async with small_fleet(Path(directory), host="localhost") as fleet:
            invite = ("people", "invite", "ada", "--role", "operator", "--public-url", fleet.url)
            link = (await fleet.relay(*invite)).strip()
            await fleet.start_relay("--no-broker")
            async with httpx2.AsyncClient(base_url=fleet.url, trust_env=False) as http:
                ada = Browser(http, fleet.url)
                await ada.accept_invitation(link)
                return await _measured(fleet, http, ada)


async def _measured(fleet: SmallFleet, http: httpx2.AsyncClient, ada: Browser) -> list[Figure]:
    body = {"client_name": "A client", "redirect_uris": [_REDIRECT]}
    client_id = (await http.post("/register", json=body)).json()["client_id"]
    signing_in, refreshing, tokens = [], [], dict[str, str]()
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        tokens = await _signed_in(http, ada, client_id)
        signing_in.append(time.perf_counter() - began)
    for _ in range(_ROUNDS):
        form = {
            "grant_type": "refresh_token",
            "refresh_token": tokens["refresh_token"],
            "client_id": client_id,
        }
        began = time.perf_counter()
        answer = await http.post("/token", data=form)
        refreshing.append(time.perf_counter() - began)
        tokens = answer.raise_for_status().json()
    pasted = (await fleet.relay("token", "issue", "--sub", "agent")).strip()
    signed, bare = await _calls(http, tokens["access_token"], pasted)
    return [
        Figure("sign_in_ms", _ms(signing_in), "ms", "unnoticed", _UNNOTICED_MS, "ratio <= 1"),
        Figure("token_refresh_ms", _ms(refreshing), "ms", "unnoticed", _UNNOTICED_MS, "ratio <= 1"),
        Figure("signed_in_call_ms", signed, "ms", "a pasted token", bare, "ratio <= 1.02"),
    ]


async def _signed_in(http: httpx2.AsyncClient, ada: Browser, client_id: str) -> dict[str, str]:
    query = {
        "response_type": "code",
        "client_id": client_id,
        "redirect_uri": _REDIRECT,
        "code_challenge": challenge_of(_VERIFIER),
        "code_challenge_method": "S256",
        "state": "s",
    }
    place = (await ada.allow(f"/authorize?{urlencode(query)}")).headers["location"]
    code = parse_qs(urlsplit(place).query)["code"][0]
    form = {"grant_type": "authorization_code", "code": code, "client_id": client_id}
    form |= {"code_verifier": _VERIFIER, "redirect_uri": _REDIRECT}
    tokens: dict[str, str] = (await http.post("/token", data=form)).raise_for_status().json()
    return tokens


async def _calls(http: httpx2.AsyncClient, signed: str, pasted: str) -> tuple[float, float]:
    """Return the medians of a call with each token, in turns: what else the machine does hits both."""
    took: dict[str, list[float]] = {signed: [], pasted: []}
    meta = {"protocolVersion": "2026-07-28", "clientCapabilities": {}}
    params = {
        "name": "find_nodes",
        "arguments": {},
        "_meta": {f"io.modelcontextprotocol/{name}": value for name, value in meta.items()},
    }
    content = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
    headers = {
        "content-type": "application/json",
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": "2026-07-28",
        "mcp-method": "tools/call",
        "mcp-name": "find_nodes",
    }
    for _ in range(_BLOCKS):
        for token, times in took.items():
            for _ in range(_CALLS // _BLOCKS):
                began = time.perf_counter()
                answer = await http.post(
                    "/mcp/kinds", content=content, headers={**headers, "authorization": f"Bearer {token}"}
                )
                times.append(time.perf_counter() - began)
                answer.raise_for_status()
    return _ms(took[signed]), _ms(took[pasted])


def _ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1000
