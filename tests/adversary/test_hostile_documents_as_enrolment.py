"""Attacker: any client that can reach ``/enroll``. Tried: requests that are no JSON of one reading.

Made of one that would be granted, so that nothing but the document is wrong. What must happen: 400 (413 for
what is too large), one ``enrolment_refused`` line, no leaf issued, and the join token not spent.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from schemas.enrolment import ENROL_PATH, MAX_REQUEST_BYTES
from tests.fakes.documents import HOSTILE, NO_OBJECTS, Spoil
from tests.fakes.enrolling import Stage, request_of
from tests.fakes.hostile_texts import HOSTILE_TEXTS
from tests.fakes.hub import Hub
from tests.fakes.refusals import audited_refusals, refusal
from tests.fakes.signer import NODE_ID
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


async def ask(stage: Stage, body: bytes) -> int:
    """Return the status that ``body`` is answered with."""
    headers = {"content-type": "application/json"}
    return (await stage.http.post(ENROL_PATH, content=body, headers=headers)).status_code


@pytest_asyncio.fixture
async def stage(hub: Hub, tmp_path: Path) -> AsyncIterator[Stage]:
    stage = await asyncio.to_thread(Stage, hub, tmp_path)
    async with stage.http:
        yield stage


@pytest.mark.parametrize("spoil", SPOILT)
async def test_a_document_with_two_readings_enrols_no_node(hub: Hub, stage: Stage, spoil: Spoil) -> None:
    good = compact(request_of(stage.token()))
    body = spoil(good)
    status, reason = (413, "too_large") if len(body) > MAX_REQUEST_BYTES else (400, "malformed")
    assert await ask(stage, body) == status
    assert audited_refusals(hub) == [refusal("enrolment_refused", "127.0.0.1", reason)]
    assert stage.ca.in_force() == {}
    # All that was wrong with it was the document: the token is as good as before.
    assert await ask(stage, good) == 200
    assert list(stage.ca.in_force()) == [NODE_ID]
