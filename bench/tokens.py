"""What it costs to identify an agent by its token, seen before and not, beside the bare signature check."""

import statistics
import time
from collections.abc import Callable

from nacl.signing import SigningKey

from bench.results import Figure
from relay.auth.agent_tokens import Authenticator, TokenIssuer
from relay.state.tokens import key_id
from schemas.addresses import mcp_url, mcp_urls
from schemas.keys import verifies
from schemas.registry import SchemaRegistry
from schemas.times import RelayMs
from schemas.tokens import AGENT_REF, TokenVerifier

_URL = "https://relay.example"
_NOW_MS = 1_790_000_000_000
_ROUNDS = 7
_COUNT = 1000


def measure_tokens() -> list[Figure]:
    """Return ``token_check_us``, for a token that is new and for one that is known."""
    registry, key = SchemaRegistry(), SigningKey(bytes(range(32)))
    public_key = bytes(key.verify_key)
    issuer = TokenIssuer(key, _URL, mcp_url(_URL), registry)
    tokens = [
        issuer.issue(
            sub=f"agent-{n}",
            tenant="bench",
            scopes=["tools:call:read_only"],
            now_s=_NOW_MS // 1000,
            ttl_s=3600,
            jti=f"jti-{n}",
        )
        for n in range(_COUNT)
    ]
    signature = key.sign(b"x" * 400).signature
    new, known, bare = [], [], []
    for _ in range(_ROUNDS):
        authenticator = Authenticator(
            TokenVerifier(registry, AGENT_REF),
            {key_id(public_key): public_key},
            issuer=_URL,
            audiences=mcp_urls(_URL),
            now_ms=lambda: RelayMs(_NOW_MS),
        )
        new.append(_us_each(tokens, authenticator.identify))
        known.append(_us_each(tokens, authenticator.identify))
        bare.append(_us_each(tokens, lambda _: verifies(public_key, b"x" * 400, signature)))
    reference = statistics.median(bare)
    return [
        _figure("token_check_us", statistics.median(new), reference, "ratio <= 3"),
        _figure("token_check_cached_us", statistics.median(known), reference, "ratio <= 0.1"),
    ]


def _us_each(tokens: list[str], work: Callable[[str], object]) -> float:
    started = time.perf_counter()
    for token in tokens:
        if not work(token):
            raise RuntimeError("what is measured must succeed")
    return (time.perf_counter() - started) / len(tokens) * 1_000_000


def _figure(name: str, value: float, reference: float, wanted: str) -> Figure:
    return Figure(name, value, "us", "PyNaCl verify alone", reference, wanted)
