"""Assembles the certificate authority and what is issued by it: enrolment, renewals, the relay's own TLS."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from relay.audit.assembly import AuditPart
from relay.environment import RelayEnvironment
from relay.part import Part
from relay.pki.authority import CertificateAuthority
from relay.pki.broker_access import BrokerAccess
from relay.pki.enrolment_endpoint import EnrolmentEndpoint, EnrolmentInfo, NameNode
from relay.pki.expiries import Expiries
from relay.pki.join_tokens import JoinTokens
from relay.pki.renewals import Renewals
from relay.pki.tls_contexts import RelayTls
from schemas.health import Loop


@dataclass(frozen=True, slots=True)
class PkiPart(Part):
    """The CA of one relay, and what nodes ask of it."""

    authority: CertificateAuthority
    tls: RelayTls
    renewals: Renewals
    enrolment: EnrolmentEndpoint
    broker_access: BrokerAccess
    expiries: Expiries

    async def run(self) -> None:
        """Keep the served certificate fresh until cancelled."""
        await self.tls.run()

    def loops(self) -> Mapping[str, Loop]:
        """The served certificate is kept fresh."""
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
    reload_broker: Callable[[], bool] | None,
) -> PkiPart:
    """Return the wing around ``authority``; ``name_node`` names the nodes that enrol.

    ``reload_broker`` has the relay's own broker, if it runs one, read its access lists again.

    Raises:
        OSError: the state directory cannot be used.
    """
    config, now_ms, random_bytes = environment.config, environment.now_ms, environment.random_bytes
    return PkiPart(
        authority=authority,
        tls=RelayTls(config, authority, now_ms=now_ms, random_bytes=random_bytes, log=environment.log),
        renewals=Renewals(authority, audit.log, now_ms, environment.log),
        enrolment=EnrolmentEndpoint(
            ca=authority,
            join_tokens=JoinTokens(config.state.join_tokens, now_ms, random_bytes),
            name_node=name_node,
            registry=environment.registry,
            info=EnrolmentInfo(config.public_url, config.node_broker or config.broker, config.own_root),
            refusals=audit.refusals,
            audit=audit.log,
            log=environment.log,
            now_ms=now_ms,
        ),
        broker_access=BrokerAccess(
            authority,
            config.broker_directory or config.state.broker,
            config.broker_pid_file,
            environment.log,
            reload_broker,
        ),
        expiries=Expiries(config, authority.root_pem),
    )
