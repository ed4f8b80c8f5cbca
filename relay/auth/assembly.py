"""Assembles what identifies callers: token keys, the external issuer, the list of revoked tokens.

Must not decide anything: it constructs the parts and connects them.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from attrs import define
from structlog.typing import FilteringBoundLogger

from relay.auth.agent_tokens import AcceptedKeys, Authenticator, ExternalIssuer
from relay.auth.issuer_keys import IssuerKeys, JwksReader, JwksSource
from relay.part import Part
from relay.settings.config import ExternalIssuerConfig
from relay.settings.environment import RelayEnvironment
from relay.state.key_files import load_or_create_key
from relay.state.tokens import KeyEndorser, RevokedTokens, TokenKeys
from schemas.addresses import mcp_urls
from schemas.error_roots import StateError
from schemas.text import printable
from schemas.tokens import AGENT_REF, EXTERNAL_AGENT_REF, EXTERNAL_HEADER_REF, TokenVerifier


@define(eq=False, repr=False)
class KeyEndorsement:
    """Writes to ``keys`` what a new root says of them, where its key is here."""

    _keys: TokenKeys
    _log: FilteringBoundLogger

    async def follow(self) -> bool:
        try:
            await asyncio.to_thread(self._keys.endorse_again)
        except (StateError, OSError) as error:
            self._log.error("no root endorses the keys of tokens", reason=printable(str(error)))
            return False
        return True


@dataclass(frozen=True, slots=True)
class AuthPart(Part):
    """Identifies callers.

    Attributes:
        token_keys, accepted_keys: the keys of the relay's own tokens, as kept and as accepted now.
        external: the issuer that the operator named besides the relay, if any.
        key_endorsement: follows a change of the roots; nothing to do where the CA's key is elsewhere.
    """

    authenticator: Authenticator
    revoked_tokens: RevokedTokens
    token_keys: TokenKeys
    accepted_keys: AcceptedKeys
    external: ExternalIssuer | None
    key_endorsement: KeyEndorsement

    async def run(self) -> None:
        await (Part.run(self) if self.external is None else self.external.keys.run())


def assemble(environment: RelayEnvironment, ca: KeyEndorser) -> AuthPart:
    """Return the part; ``ca`` endorses the keys of tokens.

    Raises:
        AuthorityStateError: there is no CA, or a file of it is damaged.
        ExposedFileError: others can read the token key.
        LedgerError: the list of token keys is damaged.
        OSError: the state directory cannot be used.
    """
    config = environment.config
    keys = _token_keys(environment, ca)
    own_keys = AcceptedKeys(environment.clock)
    own_keys.accept(keys.accepted())
    external = _external(environment, config.external_issuer, own_keys) if config.external_issuer else None
    authenticator = Authenticator(
        TokenVerifier(environment.registry, AGENT_REF),
        own_keys,
        issuer=config.public_url,
        audiences=mcp_urls(config.public_url),
        now_ms=environment.clock,
        external=external,
    )
    return AuthPart(
        authenticator=authenticator,
        revoked_tokens=RevokedTokens(config.state.revoked_tokens),
        token_keys=keys,
        accepted_keys=own_keys,
        external=external,
        key_endorsement=KeyEndorsement(keys, environment.log),
    )


def _token_keys(environment: RelayEnvironment, ca: KeyEndorser) -> TokenKeys:
    """Return the keys of tokens, this relay's own among them if it has the CA's key, or its fleet alone.

    Without that key, a relay of a cluster has none: another one issues the tokens.
    """
    state, now_ms, issues = environment.config.state, environment.now_ms, ca.can_issue()
    if environment.config.cluster is not None and not issues:
        return TokenKeys(state.token_keys, ca, now_ms)
    own = bytes(load_or_create_key(state.token_key, environment.random_bytes).verify_key)
    if not issues:
        return TokenKeys(state.token_keys, ca, now_ms, own)
    keys = TokenKeys(state.token_keys, ca, now_ms)
    # Of a key that was replaced by removing its file, no token is accepted any more.
    keys.add(own, now_ms())
    return keys


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
