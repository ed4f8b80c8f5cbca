"""What is shared with the other relays of a cluster."""

from collections.abc import Mapping

import pytest

from relay.state.ledger import LedgerError
from relay.state.tokens import RevokedTokens
from relay.state.watcher import SHARED
from tests.fakes.watched_relay import Stage, code_of

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


async def test_what_other_relays_have_sent_and_is_not_understood_refuses_calls_until_it_is(
    stage: Stage,
) -> None:
    node = stage.real.node()
    stage.sharing.understands = False
    async with stage.session(node):
        stage.hub.seconds.now += 3
        await stage.poll()
        stage.watch.confirm_unchanged()
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
