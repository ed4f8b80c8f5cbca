"""The endpoint at which nodes enrol, made of real parts, and the nodes that enrol, for the tests of both."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx2
from nacl.signing import SigningKey

from relay.http.routes import make_routes
from relay.pki.authority import CertificateAuthority
from relay.pki.enrolment_endpoint import EnrolmentEndpoint
from relay.pki.enrolments import CountedUses, EnrolmentInfo, Enrolments, NameNode, PkiEnvironment
from relay.state.join_tokens import JoinTokens
from relay.state.names import NameLedger
from schemas.addresses import BrokerAddress
from schemas.certificates import make_csr
from schemas.enrolment import NODE, JoinToken, proven
from schemas.keys import base64url
from schemas.ulids import new_node_id
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, NOW_MS, TENANT, key_named

HOUR_S = 3600
KEY, OTHER_KEY = key_named("a node"), key_named("another node")
BROKER = BrokerAddress("mqtt.example", 8883, tls=True)

Message = dict[str, Any]


def environment_of(hub: Hub, ca: CertificateAuthority) -> PkiEnvironment:
    """Return what issues certificates of ``ca`` by the clock of ``hub``, and records it there."""
    return PkiEnvironment(ca, hub.audit, hub.refusals, hub.log, hub.clock)


def enrolments_of(  # noqa: PLR0913, PLR0917 - what it is made of
    hub: Hub,
    ca: CertificateAuthority,
    join_tokens: JoinTokens,
    name_node: NameNode,
    info: EnrolmentInfo,
    fleet: CountedUses | None = None,
) -> Enrolments:
    """Return what decides who is enrolled with ``join_tokens``, whose uses ``fleet`` counts."""
    return Enrolments(
        environment_of(hub, ca), join_tokens=join_tokens, fleet=fleet, name_node=name_node, info=info
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
    enrolments = enrolments_of(hub, ca, join_tokens, name_node, info)
    return EnrolmentEndpoint(environment_of(hub, ca), enrolments, hub.registry, **options)


def request_of(
    token: JoinToken, node_id: str = NODE_ID, key: SigningKey = KEY, *, csr: str | None = None
) -> Any:
    """Return the request that a node makes with ``token``, which a test may then spoil."""
    nonce = base64url(os.urandom(32))
    message = {"join_id": token.id, "csr": csr or make_csr(key, node_id), "nonce": nonce}
    return proven(message, token.key, NODE)


class Stage:
    """The enrolment endpoint, with a real CA and real join tokens, on a clock that does not advance."""

    def __init__(self, hub: Hub, directory: Path) -> None:
        self.hub = hub
        self.directory = directory
        self.ca = CertificateAuthority(directory / "ca", hub.clock, os.urandom)
        self.ca.create()
        self.join_tokens = JoinTokens(directory / "join_tokens.jsonl", hub.clock, os.urandom)
        self.names = NameLedger(directory / "node_names.jsonl", hub.clock)
        self.routes = self.make()
        self.http = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(self.routes), base_url=PUBLIC_URL, trust_env=False
        )

    def make(self, **options: Any) -> Any:
        info = EnrolmentInfo(PUBLIC_URL, BROKER, own_root=True)
        enrolment = endpoint_of(self.hub, self.ca, self.join_tokens, self.names.name_new, info, **options)
        return make_routes(
            public_url=PUBLIC_URL,
            registry=self.hub.registry,
            metrics=self.hub.metrics,
            issuers=[],
            health=dict,
            running=nullcontext,
            more=enrolment.routes(),
        )

    def token(self, *, tenant: str = TENANT, ttl_s: int = HOUR_S, uses: int = 1, **names: Any) -> JoinToken:
        return self.join_tokens.create(tenant, ttl_s, uses, self.ca.root_pem(), **names)

    async def post(self, message: object) -> httpx2.Response:
        return await self.http.post("/enroll", json=message)

    async def enrolled(self, token: JoinToken, node_id: str = NODE_ID, key: SigningKey = KEY) -> Message:
        """Enrol, and return what the relay says."""
        response = await self.post(request_of(token, node_id, key))
        assert response.status_code == 200, response.text
        answer: Message = response.json()
        return answer

    def refusals(self) -> list[tuple[str, int]]:
        """Return the reasons that the audit gives, and how often."""
        self.hub.refusals.write()
        lines = [line for line in self.hub.audited() if line["event"] == "enrolment_refused"]
        return [(line["reason"], line["count"]) for line in lines]

    def enrolments(self) -> list[Message]:
        """Return the audit's lines on nodes that were enrolled."""
        return [line for line in self.hub.audited() if line["event"] == "enrolled"]


def new_node_ids(count: int) -> list[str]:
    return [new_node_id(NOW_MS, os.urandom) for _ in range(count)]


def unproven(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "proof"}
