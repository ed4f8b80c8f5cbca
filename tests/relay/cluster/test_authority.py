"""What relays without the CA's key ask of the one that has it: by a real nats-server, and with a real CA."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relay.cluster import authority as authority_module
from relay.cluster.authority import AuthorityAsker
from relay.cluster.messages import AuthorityMessages, authority_subject
from relay.limits.rate_limits import Allowance
from relay.pki.authority import CertificateAuthority
from relay.pki.enrolments import EnrolmentRefusedError
from relay.pki.forwarding import ForwardedEnrolments, ForwardedLeaves
from relay.pki.renewals import Renewals
from relay.routing.authority_port import (
    AuthorityAction,
    AuthorityRefusedError,
    AuthorityUnavailableError,
)
from schemas.certificates import verify_leaf
from schemas.enrolment import RELAY, JoinToken, is_proven
from schemas.errors import Failure, ToolError
from schemas.identity import Identity
from schemas.registry import SchemaRegistry
from tests.fakes.authority import CSR, Holder
from tests.fakes.cluster import Member
from tests.fakes.cluster_server import FLEET, NatsServer
from tests.fakes.enrolling import request_of
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.hub import Hub, counted
from tests.fakes.polling import BOUND_S, until
from tests.fakes.signer import NODE_ID, TENANT

ASKED = {"node_id": NODE_ID, "kid": "ab" * 32}


@dataclass
class Site:
    """A relay with a CA, and another one that asks it."""

    authority: Holder
    holder: Member
    asker: Member

    @property
    def hub(self) -> Hub:
        return self.authority.hub

    @property
    def ca(self) -> CertificateAuthority:
        return self.authority.ca

    def token(self, uses: int = 1) -> JoinToken:
        return self.authority.join_tokens.create(TENANT, 3600, uses, self.ca.root_pem())

    def enrolments(self) -> ForwardedEnrolments:
        return ForwardedEnrolments(self.asker.part.authority, self.hub.audit, self.hub.log)

    def renewals(self) -> Renewals:
        leaves = ForwardedLeaves(self.asker.part.authority)
        return Renewals(leaves, self.hub.audit, self.hub.clock, self.hub.log)

    def identity(self) -> Identity:
        return self.authority.half_used_leaf()

    def counted(self, member: Member, side: str, outcome: str) -> float:
        metrics = member.fake.environment.metrics
        return counted(metrics, "cluster_ca_requests_total", side=side, outcome=outcome)

    def audited(self) -> list[str]:
        return [line["event"] for line in self.hub.audited()]


@pytest_asyncio.fixture
async def site(nats: NatsServer, hub: Hub, tmp_path: Path, registry: SchemaRegistry) -> AsyncIterator[Site]:
    authority = Holder.below(tmp_path, hub)
    holding = Member.joined(nats.config, tmp_path / "holder", registry, authority=authority.service)
    async with holding as holder, Member.joined(nats.config, tmp_path / "asker", registry) as asker:
        await until_answered(asker)
        yield Site(authority, holder, asker)


async def until_answered(asker: Member) -> None:
    """Return once a relay with the CA's key answers: the server does not announce subscriptions."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                await asker.part.authority.ask(AuthorityAction.RETIRE, ASKED)
            except AuthorityUnavailableError:
                await asyncio.sleep(0.001)
            except AuthorityRefusedError:
                return
            else:
                raise AssertionError("a leaf that was never issued is retired")


async def test_a_node_enrols_by_its_proof_alone_and_both_relays_record_it(site: Site) -> None:
    token = site.token()
    response = await site.enrolments().enrol(request_of(token))
    assert is_proven(response, token.key, RELAY)
    assert response["relay_url"] == PUBLIC_URL
    leaf = verify_leaf(response["certificate"], site.ca.roots(), site.hub.clock())
    assert (leaf.node_id, leaf.tenant) == (NODE_ID, TENANT)
    assert site.audited() == ["enrolled", "enrolment_forwarded"]
    assert site.counted(site.asker, "asked", "ok") == 1
    assert site.counted(site.holder, "answered", "ok") == 1


async def test_a_leaf_is_renewed_for_the_key_that_it_has(site: Site) -> None:
    held, renewals = site.identity(), site.renewals()
    issued = await renewals.renew(held, CSR, server_roots=True)
    fresh = verify_leaf(issued["certificate"], [issued["roots"]], site.hub.clock())
    assert (fresh.node_id, fresh.public_key) == (NODE_ID, held.public_key)
    assert issued["server_roots"] == "".join(site.ca.servers.roots())
    assert len(issued["server_endorsements"]) == 1
    assert site.audited() == ["renewed", "renewed"]


async def test_what_the_first_relay_would_refuse_the_one_with_the_key_refuses_too(site: Site) -> None:
    held = site.identity()
    await site.renewals().renew(held, CSR)
    with pytest.raises(ToolError) as early:  # by way of a third relay, which has not seen the first
        await site.renewals().renew(held, CSR)
    assert early.value.failure is Failure.RATE_LIMITED
    assert early.value.retry_after_ms == 3_600_000
    site.ca.revoke(NODE_ID)
    with pytest.raises(ToolError) as revoked:
        await site.renewals().renew(held, CSR)
    assert revoked.value.failure is Failure.ATTESTATION_FAILED


async def test_a_node_is_retired_with_all_its_leaves(site: Site) -> None:
    held = site.identity()
    assert await site.renewals().retire(held) == [held.kid]
    assert site.ca.revoked_kids() == {held.kid}
    with pytest.raises(ToolError) as refused:
        await site.renewals().retire(held)
    assert refused.value.failure is Failure.ATTESTATION_FAILED


@pytest.mark.integration
async def test_while_the_relay_with_the_key_is_away_there_is_a_time_to_try_again(
    site: Site, nats: NatsServer
) -> None:
    request, held = request_of(site.token()), site.identity()
    nats.stop()
    await until(lambda: not site.asker.part.connection.is_connected)
    with pytest.raises(EnrolmentRefusedError) as refused:
        await site.enrolments().enrol(request)
    assert (refused.value.reason, refused.value.status) == ("ca_away", 503)
    assert refused.value.retry_after_ms == 15_000
    with pytest.raises(ToolError) as away:
        await site.renewals().renew(held, CSR)
    assert away.value.failure is Failure.INTERNAL
    assert away.value.retry_after_ms == 15_000
    nats.start()
    await until(lambda: site.asker.part.connection.is_connected)
    await until(lambda: site.holder.part.connection.is_connected)
    await until_answered(site.asker)
    assert (await site.renewals().renew(held, CSR))["certificate"]  # its turn was not used up


async def test_what_is_no_request_is_refused_and_logged_without_its_content(site: Site) -> None:
    connection = site.asker.part.connection
    data = await connection.request(authority_subject(FLEET), b'{"relay": "secret"}', BOUND_S)
    assert data == b'{"refused":{"reason":"internal"}}'
    (line,) = site.holder.fake.lines.entries("request to the CA of another relay dropped")
    assert "secret" not in str(line)


async def test_one_relay_takes_only_a_share_of_the_ca(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = Allowance(rate=0.001, burst=1, concurrency=1)
    monkeypatch.setattr(authority_module, "PER_RELAY", narrow)
    reasons = []
    for _ in range(2):
        with pytest.raises(AuthorityRefusedError) as refused:
            await site.asker.part.authority.ask(AuthorityAction.RETIRE, ASKED)
        reasons.append(refused.value.reason)
    assert reasons == ["attestation_failed", "rate_limited"]


async def test_requests_that_are_too_many_are_not_sent(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asker = site.asker.part.authority
    monkeypatch.setattr(authority_module, "MAX_WAITING", 0)
    with pytest.raises(AuthorityUnavailableError, match="too many"):
        await asker.ask(AuthorityAction.RETIRE, ASKED)


class Held:
    """A CA that does not answer until it is let go."""

    def __init__(self) -> None:
        self.asked, self.let_go = asyncio.Event(), asyncio.Event()

    async def answer(
        self, _relay: str, _action: AuthorityAction, _members: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        self.asked.set()
        await self.let_go.wait()
        return {"kids": []}


async def test_an_answer_that_is_late_is_none_and_what_was_begun_ends(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    held = Held()
    holding = Member.joined(nats.config, tmp_path / "holder", registry, authority=held)
    async with holding as holder, Member.joined(nats.config, tmp_path / "asker", registry) as member:
        outcomes: list[str] = []
        asker = AuthorityAsker(
            link=member.part.link,
            others=lambda: (),
            messages=AuthorityMessages(registry),
            count=outcomes.append,
            log=member.fake.environment.log,
            timeout_s=0.2,
        )
        async with asyncio.timeout(BOUND_S):
            while not held.asked.is_set():
                with pytest.raises(AuthorityUnavailableError):
                    await asker.ask(AuthorityAction.RETIRE, ASKED)
        with pytest.raises(AuthorityUnavailableError, match="in time"):
            await asker.ask(AuthorityAction.RETIRE, ASKED)
        assert set(outcomes) == {"away"}
        held.let_go.set()
        assert holder.part.answerer is not None
        await holder.part.answerer.close()
        metrics = holder.fake.environment.metrics
        assert counted(metrics, "cluster_ca_requests_total", side="answered", outcome="ok") >= 1
