"""Assembles the certificate authority and what is issued by it: enrolment, renewals, the relay's own TLS.

Must not decide anything but whether this relay forwards: it constructs the parts and connects them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from relay.audit.assembly import AuditPart
from relay.part import Part
from relay.pki.authority import CertificateAuthority
from relay.pki.broker_access import BrokerAccess, OwnBroker
from relay.pki.enrolment_endpoint import EnrolmentEndpoint
from relay.pki.enrolments import CountedUses, EnrolmentInfo, Enrolments, NameNode, PkiEnvironment
from relay.pki.forwarding import AuthorityService, ForwardedEnrolments, ForwardedLeaves
from relay.pki.relay_tls import Expiries, RelayTls
from relay.pki.renewals import OwnLeaves, Renewals
from relay.routing.authority_port import AnsweringAuthority, AuthorityAction, AuthorityLink
from relay.settings.environment import RelayEnvironment
from relay.state.join_tokens import JoinTokens
from schemas.error_roots import OperatorError
from schemas.health import Loop


class OwnBrokerError(OperatorError):
    """A relay without the CA's key cannot run a broker of its own."""


@dataclass(frozen=True, slots=True)
class PkiPart(Part):
    """The CA of one relay, and what nodes ask of it.

    Attributes:
        service: answers relays without the CA's key; None where this relay is one of them.
        elsewhere: asks the relay that has the key; unused where this one has it.
        join_tokens: the tokens that nodes enrol with, where the key is.
        counted_uses: has their uses counted in the fleet; unused without a cluster.
    """

    authority: CertificateAuthority
    tls: RelayTls
    renewals: Renewals
    enrolment: EnrolmentEndpoint
    broker_access: BrokerAccess
    expiries: Expiries
    service: AnsweringAuthority | None
    elsewhere: AuthorityLink
    join_tokens: JoinTokens
    counted_uses: CountedUses

    async def run(self) -> None:
        await self.tls.run()

    def loops(self) -> Mapping[str, Loop]:
        return {"certificates": self.tls.loop}


def open_authority(environment: RelayEnvironment) -> CertificateAuthority:
    """Return the CA; before anything else is opened, since its error says what to do first.

    One of a version without roots of servers gets one.

    Raises:
        AuthorityError: there is no CA, or the key that such a root is made with is not here.
        OSError: its directory cannot be used.
    """
    authority = CertificateAuthority(
        environment.config.state.ca, environment.now_ms, environment.random_bytes
    )
    authority.root_pem()
    if authority.add_server_root():
        environment.log.warning("root of servers made: make a backup", file=str(authority.servers.root_file))
    return authority


def assemble(
    environment: RelayEnvironment,
    authority: CertificateAuthority,
    audit: AuditPart,
    name_node: NameNode,
    own_broker: OwnBroker,
) -> PkiPart:
    """Return the part around ``authority``; ``name_node`` names the nodes that enrol.

    In a cluster, a relay that does not have the CA's key has another one issue. ``own_broker`` is that of the
    relay, if it runs one.

    Raises:
        OwnBrokerError: it is to run a broker of its own, without the CA's key.
        OSError: the state directory cannot be used.
    """
    config, now_ms, random_bytes = environment.config, environment.now_ms, environment.random_bytes
    elsewhere, log = AuthorityLink(), environment.log
    forwards = config.cluster is not None and not authority.can_issue()
    if forwards:
        log.info("the CA's key is on another relay: enrolments and renewals are forwarded")
    if forwards and config.own_broker is not None:
        raise OwnBrokerError("this relay has no CA key, so it runs no broker: name the fleet's with --broker")

    async def certify(use: str, public_key: str) -> str:
        members = {"use": use, "public_key": public_key}
        answer = await elsewhere.ask(AuthorityAction.CERTIFY, members)
        return str(answer["certificate"])

    pki = PkiEnvironment(authority, audit.log, audit.refusals, log, now_ms)
    join_tokens = JoinTokens(config.state.join_tokens, now_ms, random_bytes)
    counted_uses = CountedUses(join_tokens)
    own = Enrolments(
        pki,
        join_tokens=join_tokens,
        fleet=None if config.cluster is None else counted_uses,
        name_node=name_node,
        info=EnrolmentInfo(config.public_url, config.node_broker or config.broker, config.own_root),
    )
    issuer = ForwardedLeaves(elsewhere) if forwards else OwnLeaves(authority)
    renewals = Renewals(issuer, audit.log, now_ms, log)
    service = AuthorityService(pki, enrolments=own, renewals=renewals, public_url=config.public_url)
    return PkiPart(
        authority=authority,
        tls=RelayTls(
            config,
            authority,
            certify=certify if forwards else None,
            now_ms=now_ms,
            random_bytes=random_bytes,
            log=log,
        ),
        renewals=renewals,
        enrolment=EnrolmentEndpoint(
            pki,
            ForwardedEnrolments(elsewhere, audit.log, log) if forwards else own,
            environment.registry,
        ),
        broker_access=BrokerAccess(
            authority,
            config.broker_directory or config.state.broker,
            config.broker_pid_file,
            log,
            own_broker,
        ),
        expiries=Expiries(config, authority.root_pem),
        service=None if forwards else service,
        elsewhere=elsewhere,
        join_tokens=join_tokens,
        counted_uses=counted_uses,
    )
