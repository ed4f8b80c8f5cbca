"""What the watcher reads at its start, and that it goes on."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from relay.pki.errors import AuthorityError
from relay.state.ledger import LedgerError
from relay.state.watcher import Watcher
from schemas.errors import Failure
from schemas.frames import FrameReader
from schemas.registry import SchemaRegistry
from schemas.tokens import TokenError
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID
from tests.fakes.watched_relay import BOUND_S, Stage, failure, made_strange, removed, torn

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize(
    ("name", "damage", "error"),
    [
        pytest.param("ca/ledger.jsonl", torn, AuthorityError, id="the ledger"),
        pytest.param("ca/ledger.jsonl", made_strange, AuthorityError, id="an unknown entry"),
        pytest.param("ca/root.pem", removed, AuthorityError, id="the root"),
        pytest.param("revoked_tokens.jsonl", torn, LedgerError, id="the list of tokens"),
        pytest.param("node_names.jsonl", torn, LedgerError, id="the nodes' names"),
    ],
)
async def test_a_relay_that_cannot_know_who_is_revoked_does_not_begin(
    stage: Stage, name: str, damage: Callable[[Path], None], error: type[Exception]
) -> None:
    stage.real.node()
    stage.revoke_token("jti-1")
    stage.label(NODE_ID, "greenhouse pi")
    damage(stage.directory / name)
    with pytest.raises(error):
        stage.watching().begin()


async def test_revocations_survive_a_restart(
    stage: Stage, registry: SchemaRegistry, reader: FrameReader
) -> None:
    node, good = stage.real.node(), stage.real.node(OTHER_NODE_ID)
    void = stage.hub.token()
    stage.revoke_token(stage.hub.authenticator.identify(void).jti)
    stage.real.as_operator().revoke(NODE_ID)
    (stage.directory / "again").mkdir()
    hub = Hub(stage.directory / "again", registry)
    (stage.directory / "ca").rename(stage.directory / "again" / "ca.before")
    again = Stage(hub, stage.directory / "again", None, reader)
    (stage.directory / "again" / "ca").rename(stage.directory / "again" / "ca.unused")
    (stage.directory / "again" / "ca.before").rename(stage.directory / "again" / "ca")
    (stage.directory / "revoked_tokens.jsonl").rename(stage.directory / "again" / "revoked_tokens.jsonl")
    again.watch.begin()
    await again.poll()
    for each in (node, good):
        hub.announce(each)
    assert (failure(hub, good), again.leaves_looked_at) == (None, 1)
    assert failure(hub, node) is not None
    with pytest.raises(TokenError, match="revoked"):
        hub.authenticator.identify(void)
    await again.watch.poll()
    assert again.events() == []  # it was recorded when it happened
    again.close()
    hub.close()


@pytest.mark.parametrize(
    ("look_s", "poll_s"),
    [
        pytest.param(0.001, 1000, id="woken by the thread that has seen a change"),
        pytest.param(1000, 0.001, id="though nothing wakes it"),
    ],
)
async def test_it_looks_again_and_again_until_it_is_cancelled(
    stage: Stage, look_s: float, poll_s: float
) -> None:
    watch = stage.watching(look_s=look_s, poll_s=poll_s)
    watch.begin()
    task = asyncio.create_task(watch.run())
    for node in (stage.real.node(), stage.real.node(OTHER_NODE_ID)):
        stage.hub.announce(node)
        stage.real.as_operator().revoke(node.node_id)
        async with asyncio.timeout(BOUND_S):
            while failure(stage.hub, node) is not Failure.ATTESTATION_FAILED:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nothing_is_polled_while_nothing_has_changed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = stage.watching(look_s=0.001)
    watch.begin()
    looks, polls = asyncio.Queue[None](), list[None]()
    loop, confirm, poll = asyncio.get_running_loop(), watch.confirm_unchanged, watch.poll

    def confirmed() -> bool:
        loop.call_soon_threadsafe(looks.put_nowait, None)
        return confirm()

    async def polled() -> None:
        polls.append(None)
        await poll()

    monkeypatch.setattr(Watcher, "confirm_unchanged", lambda _watch: confirmed())
    monkeypatch.setattr(Watcher, "poll", lambda _watch: polled())
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(BOUND_S):
        for _ in range(20):
            await looks.get()
        assert not polls
        stage.revoke_token("jti-1")
        while not polls:
            await looks.get()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
