"""Roots, tokens and their keys take effect as the operator changes them."""

import pytest

from relay.state.tokens import key_id
from schemas.errors import Failure
from schemas.tokens import TokenError
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, OTHER_NODE_ID
from tests.fakes.watched_relay import NEXT_TOKEN_KEY, TOKEN_KEY, Stage, code_of, failure, goes_on

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

LEAF_LIFE_MS = 90 * DAY_MS


# --- roots and time -----------------------------------------------------------------------------------


async def test_when_a_root_is_withdrawn_the_sessions_of_its_leaves_end_with_4001(stage: Stage) -> None:
    node, other = stage.real.node(), stage.real.node(OTHER_NODE_ID)
    stage.real.as_operator().rotate_root(1)
    await stage.watch.poll()
    renewed = stage.real.renewed(other)
    async with stage.session(node) as end, stage.session(renewed) as others_end:
        await goes_on(end)
        assert stage.events() == []
        stage.hub.clock.advance(DAY_MS)
        await stage.watch.poll()
        assert await code_of(stage.call(node)) == "E_ATTESTATION_FAILED"
        assert (await end.until_closed())[0] == 4001
        await goes_on(others_end)
    assert stage.events() == [{"event": "root_withdrawn"}]
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED


async def test_a_leaf_of_a_root_that_was_withdrawn_is_not_believed_again(stage: Stage) -> None:
    node = stage.real.node()
    stage.hub.announce(node)
    stage.real.as_operator().rotate_root(1)
    await stage.watch.poll()
    assert failure(stage.hub, node) is None
    stage.hub.clock.advance(DAY_MS)
    await stage.watch.poll()
    stage.hub.announce(node, issued_at_ms=stage.hub.clock())
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED


async def test_the_session_of_a_leaf_that_has_run_out_ends(stage: Stage) -> None:
    node = stage.real.node()
    stage.hub.clock.advance(LEAF_LIFE_MS - 60_000)
    async with stage.session(node) as end:
        await stage.watch.poll()
        await goes_on(end)
        calling = stage.call(node)
        await end.receive("cmd")
        stage.hub.clock.advance(60_000)
        assert stage.listed() == set()  # the manifest has ended with it
        await stage.watch.poll()
        assert await code_of(calling) == "E_ATTESTATION_FAILED"
        assert (await end.until_closed())[0] == 4001
    assert failure(stage.hub, node) is Failure.MANIFEST_INVALID


# --- tokens -------------------------------------------------------------------------------------------


async def test_a_token_that_an_operator_revokes_is_void_at_the_next_look_and_its_calls_end(
    stage: Stage,
) -> None:
    node = stage.real.node()
    revoked, other = stage.hub.token(), stage.hub.token()
    jti = stage.hub.authenticator.identify(revoked).jti
    async with stage.session(node) as end:
        ends = stage.call(node, revoked)
        await end.receive("cmd")
        answered = stage.call(node, other)
        command = await end.receive("cmd")
        stage.revoke_token(jti)
        await stage.watch.poll()
        assert await code_of(ends) == "E_SAFETY_DENIED"
        with pytest.raises(TokenError, match="revoked"):
            stage.hub.authenticator.identify(revoked)
        result = {"message": "ping", "received_at_ms": stage.hub.clock(), "node_id": NODE_ID}
        await end.acknowledge(command, result)
        assert await code_of(answered) == "ok"
        await stage.watch.poll()
    assert stage.events() == [{"event": "token_revoked", "jti": jti}]


# --- the keys of tokens ---------------------------------------------------------------------------------


async def test_a_key_that_is_added_is_accepted_and_recorded_and_those_before_it_end(stage: Stage) -> None:
    stage.keys.add(TOKEN_KEY, NOW_MS)
    await stage.watch.poll()
    assert [*stage.accepted] == [key_id(TOKEN_KEY)]
    stage.keys.add(NEXT_TOKEN_KEY, stage.hub.clock() + 1)
    changes = stage.sharing.changes
    await stage.watch.poll()
    assert {*stage.accepted} == {key_id(TOKEN_KEY), key_id(NEXT_TOKEN_KEY)}
    assert stage.sharing.changes == changes + 1
    stage.hub.clock.advance(1)
    assert [*stage.accepted] == [key_id(NEXT_TOKEN_KEY)]
    assert stage.events() == [
        {"event": "token_key_accepted", "kid": key_id(key)} for key in (TOKEN_KEY, NEXT_TOKEN_KEY)
    ]


async def test_keys_end_with_the_last_root_that_endorses_them(stage: Stage) -> None:
    stage.keys.add(TOKEN_KEY, NOW_MS)
    await stage.watch.poll()
    until_ms = stage.real.as_operator().rotate_root(overlap_days=1)
    stage.hub.clock.advance(until_ms - stage.hub.clock())
    # The roots are read by one poll, and the keys by the next.
    await stage.watch.poll()
    await stage.watch.poll()
    assert [*stage.accepted] == []
