"""Assembles what identifies callers: token keys, the external issuer, the list of revoked tokens.

Must not decide anything: it constructs the parts and connects them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from relay.auth.agent_tokens import Authenticator, ExternalIssuer, key_id
from relay.auth.issuer_keys import IssuerKeys, JwksReader, JwksSource
from relay.auth.ledger_freshness import SOURCES, Freshness
from relay.auth.revoked_tokens import RevokedTokens
from relay.config import ExternalIssuerConfig
from relay.environment import RelayEnvironment
from relay.key_files import load_or_create_key
from relay.part import Part
from schemas.addresses import mcp_url
from schemas.health import Health
from schemas.tokens import AGENT_REF, EXTERNAL_AGENT_REF, EXTERNAL_HEADER_REF, TokenVerifier


@dataclass(frozen=True, slots=True)
class AuthPart(Part):
    """Identifies callers.

    Attributes:
        external: the issuer that the operator named besides the relay, if any.
        issuer: names the key of the relay's own tokens.
    """

    authenticator: Authenticator
    revoked_tokens: RevokedTokens
    external: ExternalIssuer | None
    freshness: Freshness
    issuer: str

    def health(self) -> Mapping[str, Health]:
        """Calls are refused while it is not known which tokens and leaves are revoked."""
        return {"revocations": Health.passive(ready=self.freshness.is_fresh())}

    async def run(self) -> None:
        """Keep the external issuer's keys fresh until cancelled."""
        await (Part.run(self) if self.external is None else self.external.keys.run())


def assemble(environment: RelayEnvironment) -> AuthPart:
    """Return the part.

    Raises:
        ExposedFileError: others can read the token key.
        OSError: the state directory cannot be used.
    """
    config = environment.config
    own_key = bytes(load_or_create_key(config.state.token_key, environment.random_bytes).verify_key)
    own_keys = {key_id(own_key): own_key}
    external = _external(environment, config.external_issuer, own_keys) if config.external_issuer else None
    authenticator = Authenticator(
        TokenVerifier(environment.registry, AGENT_REF),
        own_keys,
        issuer=config.public_url,
        audience=mcp_url(config.public_url),
        now_ms=environment.clock,
        external=external,
    )
    freshness = Freshness(SOURCES, environment.monotonic)
    revoked = RevokedTokens(config.state.revoked_tokens)
    return AuthPart(authenticator, revoked, external, freshness, key_id(own_key))


def _external(
    environment: RelayEnvironment, named: ExternalIssuerConfig, own_keys: Mapping[str, bytes]
) -> ExternalIssuer:
    """Return the issuer ``named``; a key of ``own_keys`` in its set is not accepted from it."""
    registry = environment.registry
    keys = IssuerKeys(
        fetch=JwksSource(named.jwks_url).fetch,
        read=JwksReader(registry, own_keys).keys,
        monotonic=environment.monotonic,
        metrics=environment.metrics,
        log=environment.log,
    )
    verifier = TokenVerifier(registry, EXTERNAL_AGENT_REF, EXTERNAL_HEADER_REF)
    return ExternalIssuer(named.issuer, verifier, keys)
