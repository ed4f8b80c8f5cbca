"""The endpoint at which nodes enrol, made of real parts, for the tests that send to it."""

from typing import Any

from relay.pki.authority import CertificateAuthority
from relay.pki.enrolment_endpoint import EnrolmentEndpoint
from relay.pki.enrolments import EnrolmentInfo, Enrolments, NameNode
from relay.pki.join_tokens import JoinTokens
from tests.fakes.hub import Hub


def enrolments_of(
    hub: Hub, ca: CertificateAuthority, join_tokens: JoinTokens, name_node: NameNode, info: EnrolmentInfo
) -> Enrolments:
    """Return what decides who is enrolled with ``join_tokens``."""
    return Enrolments(
        ca=ca,
        join_tokens=join_tokens,
        name_node=name_node,
        info=info,
        refusals=hub.refusals,
        audit=hub.audit,
        log=hub.log,
        now_ms=hub.clock,
    )


def endpoint_of(
    hub: Hub,
    ca: CertificateAuthority,
    join_tokens: JoinTokens,
    name_node: NameNode,
    info: EnrolmentInfo,
    **options: Any,
) -> EnrolmentEndpoint:
    """Return the endpoint of a relay that has the key of ``ca``; ``options`` are the endpoint's own."""
    return EnrolmentEndpoint(
        ca=ca,
        enrolments=enrolments_of(hub, ca, join_tokens, name_node, info),
        registry=hub.registry,
        refusals=hub.refusals,
        log=hub.log,
        **options,
    )
