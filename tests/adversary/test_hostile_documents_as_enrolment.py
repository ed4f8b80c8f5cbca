"""Attacker: any client that can reach ``/enroll``. Tried: requests that are no JSON of one reading.

Made of one that would be granted, so that nothing but the document is wrong. What must happen: 400 (413 for
what is too large), one ``enrolment_refused`` line, no leaf issued, and the join token not spent.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio
from starlette.applications import Starlette

from relay.pki.authority import CertificateAuthority
from relay.pki.enrolments import EnrolmentInfo
from relay.state.join_tokens import JoinTokens
from relay.state.names import NameLedger
from schemas.addresses import BrokerAddress
from schemas.certificates import make_csr
from schemas.enrolment import ENROL_PATH, MAX_REQUEST_BYTES, NODE, proven
from tests.fakes.documents import HOSTILE, NO_OBJECTS, Spoil
from tests.fakes.enrolling import endpoint_of
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.hostile_texts import HOSTILE_TEXTS
from tests.fakes.hub import Hub
from tests.fakes.refusals import audited_refusals, refusal
from tests.fakes.signer import NODE_ID, TENANT, key_named
from tests.fuzz.samples import compact

_AFTER_ID = len('{"join_id":""') + 26
SPOILT = [
    *(pytest.param(spoil, id=name) for name, (spoil, _) in HOSTILE.items()),
    *(pytest.param(lambda _good, data=data: data, id=data.decode()) for data in NO_OBJECTS),
    *(
        pytest.param(lambda good, text=text: b'{"join_id":%b' % compact(text) + good[_AFTER_ID:], id=name)
        for name, text in HOSTILE_TEXTS.items()
    ),
]


class Stage:
    """The endpoint, and a request that it would grant."""

    def __init__(self, hub: Hub, directory: Path) -> None:
        self.ca = CertificateAuthority(directory / "ca", hub.clock, os.urandom)
        self.ca.create()
        join_tokens = JoinTokens(directory / "join_tokens.jsonl", hub.clock, os.urandom)
        token = join_tokens.create(TENANT, 3600, 1, self.ca.root_pem())
        csr = make_csr(key_named("a node"), NODE_ID)
        self.good = compact(proven({"join_id": token.id, "csr": csr, "nonce": "n" * 43}, token.key, NODE))
        names = NameLedger(directory / "node_names.jsonl", hub.clock).name_new
        info = EnrolmentInfo(PUBLIC_URL, BrokerAddress("mqtt.example", 8883, tls=True), own_root=True)
        enrolment = endpoint_of(hub, self.ca, join_tokens, names, info)
        transport = httpx2.ASGITransport(Starlette(routes=enrolment.routes()))
        self.http = httpx2.AsyncClient(transport=transport, base_url=PUBLIC_URL, trust_env=False)

    async def ask(self, body: bytes) -> int:
        """Return the status that ``body`` is answered with."""
        headers = {"content-type": "application/json"}
        return (await self.http.post(ENROL_PATH, content=body, headers=headers)).status_code


@pytest_asyncio.fixture
async def stage(hub: Hub, tmp_path: Path) -> AsyncIterator[Stage]:
    stage = await asyncio.to_thread(Stage, hub, tmp_path / "stage")
    async with stage.http:
        yield stage


@pytest.mark.parametrize("spoil", SPOILT)
async def test_a_document_with_two_readings_enrols_no_node(hub: Hub, stage: Stage, spoil: Spoil) -> None:
    body = spoil(stage.good)
    status, reason = (413, "too_large") if len(body) > MAX_REQUEST_BYTES else (400, "malformed")
    assert await stage.ask(body) == status
    assert audited_refusals(hub) == [refusal("enrolment_refused", "127.0.0.1", reason)]
    assert stage.ca.in_force() == {}
    # All that was wrong with it was the document: the token is as good as before.
    assert await stage.ask(stage.good) == 200
    assert list(stage.ca.in_force()) == [NODE_ID]
