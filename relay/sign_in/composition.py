"""Makes sign-in out of what the relay has, or what forwards it. Must not contain behaviour of its own."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from starlette.applications import Starlette
from starlette.routing import Route

from relay.audit.refusal_counts import RefusalCounter
from relay.audit.writer import AuditWriter
from relay.auth.agent_tokens import Principal, TokenIssuer
from relay.limits.rate_limits import KeyedLimiters
from relay.routing.port import Peers
from relay.settings.environment import RelayEnvironment
from relay.sign_in.assertions import Assertions
from relay.sign_in.authorization import AuthorizationServer
from relay.sign_in.clients import Clients
from relay.sign_in.consent import LONGEST_MS, Tags
from relay.sign_in.fetching import Fetcher
from relay.sign_in.forwarding import KIND, ForwardedSignIn, answering
from relay.sign_in.incoming import AddressMeter
from relay.sign_in.metadata import TOKEN, server_metadata
from relay.sign_in.pages import FROM_ELSEWHERE, SignInPages
from relay.sign_in.passkeys import Passkeys
from relay.sign_in.redeeming import SharedRedemptions, alone
from relay.sign_in.service import SignIn
from relay.state.grants import Grants
from relay.state.key_files import read_key
from relay.state.people import PeopleLedger
from relay.state.redemptions import Redemptions
from relay.state.sharer import Sharing
from relay.state.tokens import IssuedTokens
from schemas.addresses import mcp_url

if TYPE_CHECKING:
    from relay.sign_in.provider import ProviderSignIn


class FleetOf(NamedTuple):
    """The other relays; ``is_joined``: what ``sharing`` has in common with them is up to date at present."""

    peers: Peers
    sharing: Sharing
    is_joined: Callable[[], bool]


def make_sign_in(  # noqa: PLR0913 - what comes in from outside
    environment: RelayEnvironment,
    *,
    people: PeopleLedger,
    grants: Grants,
    identify: Callable[[str], Principal],
    audit: AuditWriter,
    refusals: RefusalCounter,
    tenants: Callable[[], Iterable[str]],
    tags: Tags,
    more: Sequence[Route],
    fleet: FleetOf | None,
) -> tuple[Starlette, frozenset[str]]:
    """Return what serves sign-in, with the routes ``more``, and the paths that it serves.

    ``fleet``: with other relays, whose requests it answers.

    Raises:
        LedgerError, OSError: the list of people cannot be used.
    """
    config, now_ms, random_bytes = environment.config, environment.now_ms, environment.random_bytes
    url, state = config.public_url, config.state
    longest_ms = LONGEST_MS if config.oidc is None else config.oidc.max_lifetime_ms
    fetcher = Fetcher() if config.fetch_client_documents else None
    clients = Clients(people.registration_key(), fetcher, environment.monotonic)

    shared = fleet and SharedRedemptions(
        redemptions=Redemptions(state.redemptions, now_ms),
        sharing=fleet.sharing,
        is_joined=fleet.is_joined,
        new_id=environment.ulids.new,
    )

    def issuer() -> TokenIssuer:
        # Read for each token: the operator may have replaced the key.
        return TokenIssuer(read_key(state.token_key), url, mcp_url(url), environment.registry)

    server = AuthorizationServer(
        issuer=url,
        clients=clients,
        assertions=Assertions(frozenset({url, f"{url}/", url + TOKEN}), now_ms),
        people=people,
        grants=grants,
        issued=IssuedTokens(state.issued_tokens),
        sign=issuer,
        identify=identify,
        redeem_once=shared.redeem if shared else alone,
        kinds=environment.kinds,
        longest_ms=longest_ms,
        limits=KeyedLimiters(environment.monotonic),
        new_id=environment.ulids.new,
        now_ms=now_ms,
        random_bytes=random_bytes,
    )
    service = SignIn(
        public_url=url,
        metadata=server_metadata(url, fetches=config.fetch_client_documents),
        server=server,
        clients=clients,
        passkeys=Passkeys(public_url=url, people=people, now_ms=now_ms, random_bytes=random_bytes),
        grants=grants,
        kinds=environment.kinds,
        tenants=tenants,
        tags=tags,
        audit=audit,
        refusals=refusals,
        metrics=environment.metrics,
        log=environment.log,
        now_ms=now_ms,
        meter=AddressMeter(
            KeyedLimiters(environment.monotonic), lambda one: people.read().active(one) is not None
        ),
        longest_ms=longest_ms,
        elsewhere=_provider(environment, people, grants, audit),
    )
    application, paths = service.application(more)
    if fleet is not None:
        fleet.peers.answer(KIND, answering(application))
    return application, paths


def make_forwarded_sign_in(
    environment: RelayEnvironment, refusals: RefusalCounter, peers: Peers, more: Sequence[Route]
) -> tuple[Starlette, frozenset[str]]:
    """Return what serves sign-in by another relay, with the routes ``more``, and their paths."""
    forwarded = ForwardedSignIn(
        metadata=server_metadata(
            environment.config.public_url, fetches=environment.config.fetch_client_documents
        ),
        peers=peers,
        pages=SignInPages(environment.config.public_url),
        metrics=environment.metrics,
        refusals=refusals,
        # Whose success it was, the other relay knows.
        meter=AddressMeter(KeyedLimiters(environment.monotonic), lambda _person: True),
    )
    return forwarded.application(more)


def _provider(
    environment: RelayEnvironment, people: PeopleLedger, grants: Grants, audit: AuditWriter
) -> "ProviderSignIn | None":
    """Return the sign-in at the provider that the operator has named, if there is one."""
    oidc = environment.config.oidc
    if oidc is None:
        return None
    from relay.auth.openid_provider import OpenidProvider  # noqa: PLC0415 - an option of the option
    from relay.sign_in.provider import ProviderSignIn  # noqa: PLC0415 - as above

    return ProviderSignIn(
        config=oidc,
        provider=OpenidProvider(
            issuer=oidc.issuer,
            client_id=oidc.client_id,
            secret=oidc.secret,
            redirect_uri=environment.config.public_url + FROM_ELSEWHERE,
            now_ms=environment.now_ms,
            monotonic=environment.monotonic,
        ),
        people=people,
        grants=grants,
        kinds=environment.kinds,
        audit=audit,
        log=environment.log,
        now_ms=environment.now_ms,
        random_bytes=environment.random_bytes,
    )
