"""The endpoint at which nodes enrol, made of real parts, for the tests that send to it."""

from typing import Any

from relay.pki.authority import CertificateAuthority
from relay.pki.enrolment_endpoint import EnrolmentEndpoint
from relay.pki.enrolments import EnrolmentInfo, Enrolments, NameNode
from relay.pki.environment import PkiEnvironment
from relay.pki.join_tokens import JoinTokens
from tests.fakes.hub import Hub


def environment_of(hub: Hub, ca: CertificateAuthority) -> PkiEnvironment:
    """Return what issues certificates of ``ca`` by the clock of ``hub``, and records it there."""
    return PkiEnvironment(ca, hub.audit, hub.refusals, hub.log, hub.clock)


def enrolments_of(
    hub: Hub, ca: CertificateAuthority, join_tokens: JoinTokens, name_node: NameNode, info: EnrolmentInfo
) -> Enrolments:
    """Return what decides who is enrolled with ``join_tokens``."""
    return Enrolments(environment_of(hub, ca), join_tokens=join_tokens, name_node=name_node, info=info)


def endpoint_of(
    hub: Hub,
    ca: CertificateAuthority,
    join_tokens: JoinTokens,
    name_node: NameNode,
    info: EnrolmentInfo,
    **options: Any,
) -> EnrolmentEndpoint:
    """Return the endpoint of a relay that has the key of ``ca``; ``options`` are the endpoint's own."""
    enrolments = enrolments_of(hub, ca, join_tokens, name_node, info)
    return EnrolmentEndpoint(environment_of(hub, ca), enrolments, hub.registry, **options)
