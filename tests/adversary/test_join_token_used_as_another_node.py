"""Attacker: the holder of a good join token and of a key. Tried: enrolling under the id of a node that
exists, in its tenant and in that of the token, with a request that the node once made, and after the node
was revoked.

What must happen: 403, in the same words as for a made-up token; the ledger stays as it was, the token
is not used up, and the audit says ``enrolment_refused``, ``id_taken``.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from schemas.certificates import make_csr, verify_leaf
from schemas.enrolment import JoinToken
from tests.fakes.enrolling import Stage, request_of
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, key_named

VICTIM, ATTACKER = key_named("the victim"), key_named("the attacker")


class Attack(Stage):
    """A relay on which the victim is enrolled, and what the attacker sends to it."""

    def __init__(self, hub: Hub, directory: Path) -> None:
        super().__init__(hub, directory)
        self.victims_csr = make_csr(VICTIM, NODE_ID)
        self.ca.enrol(self.victims_csr, TENANT, self.token().id)

    async def send(self, token: JoinToken, csr: str) -> httpx2.Response:
        return await self.post(request_of(token, csr=csr))

    def audited(self) -> list[tuple[str, str]]:
        self.hub.refusals.write()
        return [(line["event"], line.get("reason", "")) for line in self.hub.audited()]


@pytest_asyncio.fixture
async def attack(hub: Hub, tmp_path: Path) -> AsyncIterator[Attack]:
    attack = await asyncio.to_thread(Attack, hub, tmp_path)
    async with attack.http:
        yield attack


@pytest.mark.parametrize("tenant", [TENANT, "the-attackers"])
@pytest.mark.parametrize("whose", ["its own request", "the victim's request"])
@pytest.mark.parametrize("revoked", [False, True], ids=["while it is trusted", "after it was revoked"])
async def test_no_token_enrols_a_node_under_an_id_that_exists(
    attack: Attack, tenant: str, whose: str, *, revoked: bool
) -> None:
    if revoked:
        attack.ca.revoke(NODE_ID)
    held, token = attack.ca.in_force(), attack.token(tenant=tenant)
    csr = make_csr(ATTACKER, NODE_ID) if whose == "its own request" else attack.victims_csr
    refused = await attack.send(token, csr)
    assert refused.status_code == 403
    assert attack.audited() == [("enrolment_refused", "id_taken")]
    assert attack.ca.in_force() == held

    unknown = await attack.send(JoinToken("0" * 26, os.urandom(32), bytes(32)), csr)
    assert (unknown.status_code, unknown.content) == (refused.status_code, refused.content)
    assert attack.audited()[1:] == [("enrolment_refused", "unknown_token")]

    # Under a new id the same token still is good: nothing was used up, and nothing was gained.
    good = await attack.send(token, make_csr(ATTACKER, OTHER_NODE_ID))
    leaf = verify_leaf(good.json()["certificate"], attack.ca.roots(), NOW_MS)
    assert (leaf.node_id, leaf.tenant) == (OTHER_NODE_ID, tenant)
