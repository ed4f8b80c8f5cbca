"""What the operator changes takes effect, here and at the other relays of the fleet."""

import asyncio
import json
from collections.abc import Mapping

import pytest

from relay.state.ledger import LedgerError
from relay.state.names import NameLedger
from relay.state.tokens import RevokedTokens, key_id
from relay.state.watcher import SHARED
from schemas.errors import Failure
from schemas.tokens import TokenError
from tests.fakes.background import in_background
from tests.fakes.polling import until
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, key_named
from tests.fakes.watched_relay import (
    BOUND_S,
    NEXT_TOKEN_KEY,
    READERS,
    TOKEN_KEY,
    Stage,
    code_of,
    failure,
    goes_on,
)

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


LEAF_LIFE_MS = 90 * DAY_MS


# --- roots, tokens and their keys take effect as the operator changes them


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


# --- the names of nodes take effect as the operator changes them


async def test_what_the_operator_calls_a_node_is_in_effect_at_the_next_poll(stage: Stage) -> None:
    names = stage.hub.fleet.names
    stage.hub.announce(stage.real.node())
    stage.label(NODE_ID, "greenhouse pi")
    await stage.watch.poll()
    assert names.resolve(TENANT, "greenhouse pi") == NODE_ID
    stage.label(NODE_ID, "barn")
    await stage.watch.poll()
    await stage.watch.poll()
    assert names.label_of(NODE_ID) == "barn"
    assert len(stage.hub.lines.entries("node named")) == 2


async def test_a_name_that_changes_ends_at_once_what_a_token_is_for_no_longer(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[str] = []
    monkeypatch.setattr(type(stage.hub.telemetry), "sweep", lambda _: swept.append("telemetry"))
    monkeypatch.setattr(type(stage.hub.expiry), "sweep_sessions", lambda _: swept.append("sessions"))
    await stage.watch.poll()
    assert swept == []
    stage.label(NODE_ID, "barn")
    await stage.watch.poll()
    assert swept == ["telemetry", "sessions"]


async def test_a_node_that_is_revoked_is_in_no_list_and_one_that_is_forgotten_is_not_known(
    stage: Stage,
) -> None:
    node, other = stage.real.node(), stage.real.node(OTHER_NODE_ID)
    stage.hub.announce(node)
    stage.hub.announce(other)
    stage.label(NODE_ID, "greenhouse pi")
    stage.real.as_operator().revoke(NODE_ID)
    await stage.watch.poll()
    assert [each.node_id for each in stage.hub.nodes_of(TENANT)] == [OTHER_NODE_ID]
    assert stage.hub.fleet.tenant_of(NODE_ID) is not None
    NameLedger(stage.directory / "node_names.jsonl", stage.hub.clock).forget(NODE_ID)
    await stage.watch.poll()
    assert stage.hub.fleet.tenant_of(NODE_ID) is None
    assert stage.hub.fleet.names.label_of(NODE_ID) == ""
    assert failure(stage.hub, node) is Failure.SAFETY_DENIED
    stage.hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert stage.hub.fleet.tenant_of(NODE_ID) is None
    again = stage.real.node(key=key_named("another key"), replace=True)
    await stage.watch.poll()
    stage.hub.announce(again, issued_at_ms=stage.hub.clock.advance(1))
    assert failure(stage.hub, again) is None
    await stage.watch.poll()
    assert {each.node_id for each in stage.hub.nodes_of(TENANT)} == {NODE_ID, OTHER_NODE_ID}


async def test_a_node_that_is_forgotten_while_its_session_ends_is_forgotten_after_it(stage: Stage) -> None:
    async with stage.session(stage.real.node()) as end:
        stage.real.as_operator().revoke(NODE_ID)
        NameLedger(stage.directory / "node_names.jsonl", stage.hub.clock).forget(NODE_ID)
        await stage.watch.poll()
        assert (await end.until_closed())[0] == 4003
        assert stage.hub.fleet.tenant_of(NODE_ID) is None


async def test_names_survive_a_restart_and_are_not_logged_at_it(stage: Stage) -> None:
    stage.label(NODE_ID, "greenhouse pi")
    stage.watching().begin()
    assert stage.hub.fleet.names.label_of(NODE_ID) == "greenhouse pi"
    assert stage.hub.lines.entries("node named") == []


# --- nodes that an operator revokes, moves or replaces: sessions, tools and calls end at the next poll


async def test_a_node_that_comes_to_another_tenant_is_audited_once(stage: Stage) -> None:
    before = stage.real.node(tenant="acme")
    await stage.watch.poll()
    after = stage.real.node(tenant="globex", replace=True)
    for _ in range(2):
        await stage.watch.poll()
    assert stage.events() == [
        {"event": "leaf_revoked", "kid": before.kid},
        {"event": "tenant_changed", "node_id": NODE_ID, "tenant": "globex", "kid": after.kid},
    ]


@pytest.mark.parametrize("by", ["node", "kid"])
async def test_what_an_operator_revokes_is_shut_out_at_the_next_look(stage: Stage, by: str) -> None:
    node, other = stage.real.node(), stage.real.node(OTHER_NODE_ID)
    async with stage.session(node) as end, stage.session(other) as others_end:
        calling = stage.call(node)
        await end.receive("cmd")
        stage.real.as_operator().revoke(node.node_id if by == "node" else node.kid)
        assert stage.listed() == {NODE_ID, OTHER_NODE_ID}
        await stage.watch.poll()
        assert stage.listed() == {OTHER_NODE_ID}
        assert await code_of(calling) == "E_ATTESTATION_FAILED"
        code, frames = await end.until_closed()
        assert (code, [frame.payload for frame in frames]) == (4003, [{"reason": "revoked"}])
        assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED
        assert await code_of(stage.call(node)) == "E_ATTESTATION_FAILED"
        await goes_on(others_end)
    assert stage.events() == [{"event": "leaf_revoked", "kid": node.kid}]
    assert stage.hub.counted("sessions_total", event="shut_out") == 1
    assert [line["outcome"] for line in stage.hub.audited() if "outcome" in line] == ["error"]


async def test_a_revoked_node_does_not_come_back(stage: Stage) -> None:
    node = stage.real.node()
    async with stage.session(node) as end:
        stage.real.as_operator().revoke(NODE_ID)
        await stage.watch.poll()
        await end.until_closed()
    stage.hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    wire = node.manifest(issued_at_ms=stage.hub.clock.advance(1))
    stage.hub.fleet.offer_manifest(NODE_ID, wire, "broker")
    assert stage.listed() == set()
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED
    with pytest.raises(AssertionError):
        async with stage.session(node):
            raise NotImplementedError


async def test_a_session_that_waits_to_be_resumed_cannot_be(stage: Stage) -> None:
    node = stage.real.node()
    async with stage.session(node) as end:
        calling = stage.call(node)
        await end.receive("cmd")
    await until(lambda: not stage.hub.counted("nodes_connected"))
    stage.real.as_operator().revoke(NODE_ID)
    await stage.watch.poll()
    assert await code_of(calling) == "E_ATTESTATION_FAILED"


async def test_a_node_that_renewed_goes_on_without_its_old_leaf(stage: Stage) -> None:
    node = stage.real.node()
    async with stage.session(node) as end:
        fresh = stage.real.renewed(node)
        stage.hub.fleet.offer_identity(NODE_ID, fresh.leaf_pem)
        await end.send("announce", json.loads(fresh.manifest(issued_at_ms=stage.hub.clock.advance(1))))
        await end.receive("announce_ack")
        stage.real.as_operator().revoke(node.kid)
        await stage.watch.poll()
        await goes_on(end)
        assert stage.listed() == {NODE_ID}
        stage.real.as_operator().revoke(fresh.kid)
        await stage.watch.poll()
        assert (await end.until_closed())[0] == 4003
    assert stage.listed() == set()


async def test_a_node_that_was_given_another_key_comes_in_with_that_alone(stage: Stage) -> None:
    node = stage.real.node()
    async with stage.session(node) as end:
        fresh = stage.real.node(key=key_named("another key"), replace=True)
        await stage.watch.poll()
        assert (await end.until_closed())[0] == 4003
    async with stage.session(fresh) as end:
        await goes_on(end)
        assert stage.listed() == {NODE_ID}
        assert failure(stage.hub, fresh) is None


async def test_who_listens_is_told_at_once_and_does_not_wait_for_the_next_second(stage: Stage) -> None:
    heard = asyncio.Event()

    async def listener() -> None:
        heard.set()

    node = stage.real.node()
    stage.hub.connect(node)
    stage.notifier.listen(READERS, listener)
    async with in_background(stage.notifier.run()):  # looks every thousand seconds unless it is woken
        stage.real.as_operator().revoke(NODE_ID)
        await stage.watch.poll()
        await asyncio.wait_for(heard.wait(), BOUND_S)


async def test_what_needs_to_know_of_leaves_is_told_of_every_change_and_of_nothing_else(stage: Stage) -> None:
    await stage.poll()
    await stage.poll()
    assert stage.leaves_looked_at == 1  # as it began
    stage.real.node()
    await stage.poll()
    assert stage.leaves_looked_at == 2
    stage.real.as_operator().revoke(NODE_ID)
    await stage.poll()
    await stage.poll()
    assert stage.leaves_looked_at == 3
    assert len(stage.events()) == 1


async def test_a_node_that_leaves_for_good_is_in_the_audit_as_revoked(stage: Stage) -> None:
    node = stage.real.node()
    async with stage.session(node) as end:
        await end.send("retire", {})
        assert (await end.until_closed())[0] == 4003
    await stage.watch.poll()
    assert [event["event"] for event in stage.events()] == ["retired", "leaf_revoked"]
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED


# --- what is shared with the other relays of a cluster


async def test_what_other_relays_have_sent_and_is_not_understood_refuses_calls_until_it_is(
    stage: Stage,
) -> None:
    node = stage.real.node()
    stage.sharing.understands = False
    async with stage.session(node):
        stage.hub.seconds.now += 3
        await stage.poll()
        stage.watch.look()
        assert await code_of(stage.call(node)) == "E_INTERNAL"
    (line,) = stage.hub.lines.entries("the ledgers cannot be read; calls are refused")
    assert line["unread"] == [SHARED]
    stage.sharing.understands = True
    await stage.watch.poll()
    assert stage.hub.freshness.is_fresh()


async def test_of_every_change_of_a_ledger_the_other_relays_are_told_once(stage: Stage) -> None:
    await stage.poll()
    before = stage.sharing.changes
    stage.revoke_token("jti-1")
    await stage.poll()
    await stage.poll()
    assert stage.sharing.changes == before + 1
    assert stage.sharing.kinds == {"token_revocation"}
    stage.join_tokens.revoke("01HZX9K3M4P7Q8R9S0T1V2W3XY", made_here=False)
    await stage.poll()
    await stage.poll()
    assert stage.sharing.changes == before + 2
    assert stage.sharing.kinds == {"token_revocation", "join_token_revocation", "join_token_use"}


async def test_the_other_relays_are_told_before_a_change_is_read_here_and_once_though_it_cannot_be(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stage.sharing.changes
    stage.revoke_token("jti-1")
    with monkeypatch.context() as patch:

        def unreadable(_self: RevokedTokens) -> Mapping[str, int]:
            assert stage.sharing.changes == before + 1
            raise LedgerError("planted")

        patch.setattr(RevokedTokens, "times", unreadable)
        await stage.watch.poll()
        await stage.watch.poll()
    assert stage.hub.lines.entries("a change cannot be read")[0]["reason"] == "planted"
    await stage.watch.poll()
    assert stage.events() == [{"event": "token_revoked", "jti": "jti-1"}]
    assert stage.sharing.changes == before + 1
