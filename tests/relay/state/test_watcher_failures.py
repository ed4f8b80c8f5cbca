"""Ledgers that cannot be read, and parts that are slow: no revocation is lost or late."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event

import pytest

from relay.pki.errors import AuthorityError
from relay.state.certificates import CaRecords
from relay.state.kinds import CERTIFICATES, NODE_NAMES, REVOKED_TOKENS, VERIFYING_KEYS
from relay.state.ledger import LedgerError
from relay.state.tokens import RevokedTokens
from relay.state.watcher import Watched, Watcher
from schemas.errors import Failure, ToolError
from schemas.files import write_atomic
from schemas.frames import FrameReader
from schemas.registry import SchemaRegistry
from schemas.tokens import TokenError
from tests.fakes.background import in_background
from tests.fakes.disk import full_disk
from tests.fakes.hub import Hub
from tests.fakes.node_end import NodeEnd
from tests.fakes.polling import until
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, SimulatedNode
from tests.fakes.watched_relay import (
    BOUND_S,
    TOKEN_KEY,
    Stage,
    code_of,
    emptied,
    failure,
    goes_on,
    made_strange,
    removed,
    torn,
)

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


async def until_shut_out(stage: Stage, node: SimulatedNode) -> None:
    await until(lambda: failure(stage.hub, node) is Failure.ATTESTATION_FAILED)


# --- what the watcher reads at its start, and that it goes on


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
    async with in_background(watch.run()):
        for node in (stage.real.node(), stage.real.node(OTHER_NODE_ID)):
            stage.hub.announce(node)
            stage.real.as_operator().revoke(node.node_id)
            await until_shut_out(stage, node)


async def test_nothing_is_polled_while_nothing_has_changed_and_then_what_has_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = stage.watching(look_s=0.001)
    watch.begin()
    looks, polls = asyncio.Queue[None](), list[list[str]]()
    loop, look, poll = asyncio.get_running_loop(), Watcher.look, Watcher.poll

    def looked(self: Watcher) -> Sequence[Watched]:
        loop.call_soon_threadsafe(looks.put_nowait, None)
        return look(self)

    async def polled(self: Watcher, files: Sequence[Watched]) -> None:
        polls.append([file.name for file in files])
        await poll(self, files)

    monkeypatch.setattr(Watcher, "look", looked)
    monkeypatch.setattr(Watcher, "poll", polled)
    async with in_background(watch.run()), asyncio.timeout(BOUND_S):
        for _ in range(20):
            await looks.get()
        assert not polls
        stage.revoke_token("jti-1")
        while not polls:
            await looks.get()
    assert polls[0] == [REVOKED_TOKENS.name]


# --- threads, the audit and parts that are slow do not delay a revocation


THIRD_NODE_ID = NODE_ID[:-1] + "1"


async def test_ledgers_are_looked_at_while_the_event_loop_is_held_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = stage.watching(look_s=0.001)
    watch.begin()
    counted = Event()

    def read(name: str) -> None:
        if name == CERTIFICATES.name:
            counted.set()

    async with in_background(watch.run()):
        await asyncio.sleep(0)
        monkeypatch.setattr(stage.hub.freshness, "read", read)
        assert counted.wait(BOUND_S)


async def test_a_part_that_does_not_follow_yet_holds_up_no_revocation(stage: Stage) -> None:
    began = asyncio.Queue[None]()

    async def never_done() -> bool:
        began.put_nowait(None)
        await asyncio.Event().wait()
        return True

    watch = stage.watching(never_done, look_s=0)
    watch.begin()
    async with in_background(stage.follow_ups.run()), in_background(watch.run()):
        await asyncio.wait_for(began.get(), BOUND_S)
        node = stage.real.node()
        stage.hub.announce(node)
        stage.real.as_operator().revoke(NODE_ID)
        await until_shut_out(stage, node)


async def test_the_event_loop_goes_on_while_the_ledgers_are_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = stage.real.node()
    stage.hub.announce(node)
    stage.real.as_operator().revoke(NODE_ID)
    stage.revoke_token("jti-1")
    read_on = Event()
    records = stage.real.ca.records

    def slow() -> CaRecords:
        assert read_on.wait(BOUND_S)
        return records()

    monkeypatch.setattr(stage.real.ca, "records", slow)
    looking = asyncio.create_task(stage.watch.poll())
    await until(lambda: stage.hub.lines.entries("token_revoked"))  # it does not wait for the leaves
    assert not looking.done()
    assert failure(stage.hub, node) is None
    read_on.set()
    await asyncio.wait_for(looking, BOUND_S)
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED


async def test_those_who_wait_for_the_ca_on_threads_hold_up_no_revocation(stage: Stage) -> None:
    node = stage.real.node()
    stage.hub.announce(node)
    stage.real.as_operator().revoke(NODE_ID)
    free = Event()
    waiting = [asyncio.create_task(asyncio.to_thread(free.wait, BOUND_S)) for _ in range(40)]
    await asyncio.sleep(0)
    await asyncio.wait_for(stage.watch.poll(), BOUND_S)
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED
    assert not any(task.done() for task in waiting)
    free.set()
    await asyncio.gather(*waiting)


async def test_a_revocation_takes_effect_though_the_audit_cannot_be_written_and_is_recorded_when_it_can(
    stage: Stage,
) -> None:
    first, second, last = stage.real.node(), stage.real.node(OTHER_NODE_ID), stage.real.node(THIRD_NODE_ID)
    stage.hub.announce(first)
    for node in (first, second):
        stage.real.as_operator().revoke(node.node_id)
        with full_disk(0):
            await stage.watch.poll()
            await stage.watch.poll()
        assert failure(stage.hub, first) is Failure.ATTESTATION_FAILED
    assert stage.events() == []
    stage.real.as_operator().revoke(THIRD_NODE_ID)
    await stage.watch.poll()
    kids = [node.kid for node in (first, second, last)]
    assert stage.events() == [{"event": "leaf_revoked", "kid": kid} for kid in kids]
    (line,) = stage.hub.lines.entries("not recorded")
    assert (line["level"], line["what"]) == ("error", {"event": "leaf_revoked", "kid": first.kid})
    await stage.watch.poll()
    assert len(stage.events()) == 3


async def test_not_more_than_so_much_waits_to_be_recorded_and_what_is_left_out_is_in_the_log(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.server.decisions.MAX_UNRECORDED", 1)
    for jti in ("jti-1", "jti-2"):
        stage.revoke_token(jti)
    with full_disk(0):
        await stage.watch.poll()
    assert [line["what"]["jti"] for line in stage.hub.lines.entries("not recorded")] == ["jti-2", "jti-1"]
    await stage.watch.poll()
    assert stage.events() == [{"event": "token_revoked", "jti": "jti-1"}]


# --- ledgers that are damaged, unreadable or restored: nothing in effect changes, and calls are refused


SOURCE = {
    "ca/ledger.jsonl": CERTIFICATES.name,
    "ca/root.pem": CERTIFICATES.name,
    "revoked_tokens.jsonl": REVOKED_TOKENS.name,
    "token_keys.jsonl": VERIFYING_KEYS.name,
    "node_names.jsonl": NODE_NAMES.name,
}
"""What each file is called in the log."""


damaged = pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param("ca/ledger.jsonl", torn, id="a line that is none"),
        pytest.param("ca/ledger.jsonl", made_strange, id="an unknown entry"),
        pytest.param("ca/root.pem", emptied, id="the root is empty"),
        pytest.param("ca/root.pem", removed, id="the root is gone"),
        pytest.param("revoked_tokens.jsonl", torn, id="the list of tokens"),
        pytest.param("token_keys.jsonl", torn, id="the keys of tokens"),
        pytest.param("revoked_tokens.jsonl", made_strange, id="an entry that names no token"),
        pytest.param("node_names.jsonl", torn, id="the nodes' names"),
        pytest.param("node_names.jsonl", made_strange, id="an entry that names no node"),
    ],
)


@damaged
async def test_what_is_damaged_changes_nothing_that_is_in_effect_and_is_said_once(
    stage: Stage, name: str, damage: Callable[[Path], None]
) -> None:
    revoked, node = stage.real.node(OTHER_NODE_ID), stage.real.node()
    stage.hub.announce(revoked)
    void, good = stage.hub.token(), stage.hub.token()
    stage.revoke_token(stage.hub.authenticator.identify(void).jti)
    stage.keys.add(TOKEN_KEY, NOW_MS)
    stage.real.as_operator().revoke(OTHER_NODE_ID)
    stage.label(NODE_ID, "greenhouse pi")
    async with stage.session(node) as end:
        await stage.watch.poll()
        damage(stage.directory / name)
        for _ in range(4):
            await stage.watch.poll()
        await goes_on(end)
        assert stage.listed() == {NODE_ID}
    assert failure(stage.hub, revoked) is Failure.ATTESTATION_FAILED
    with pytest.raises(TokenError, match="revoked"):
        stage.hub.authenticator.identify(void)
    stage.hub.authenticator.identify(good)
    assert stage.hub.fleet.names.label_of(NODE_ID) == "greenhouse pi"
    (line,) = stage.hub.lines.entries("a change cannot be read")
    assert line["what"] == SOURCE[name]
    assert line["level"] == "error"


@damaged
async def test_when_a_ledger_cannot_be_read_for_three_seconds_calls_are_refused_until_it_can(
    stage: Stage, name: str, damage: Callable[[Path], None]
) -> None:
    node = stage.real.node()
    stage.keys.add(TOKEN_KEY, NOW_MS)
    stage.revoke_token("jti-1")
    stage.label(NODE_ID, "greenhouse pi")
    result = {"message": "ping", "received_at_ms": stage.hub.clock(), "node_id": NODE_ID}

    async def goes_through(end: NodeEnd) -> None:
        calling = stage.call(node)
        await end.acknowledge(await end.receive("cmd"), result)
        assert await code_of(calling) == "ok"

    path = stage.directory / name
    whole = path.read_bytes()
    async with stage.session(node) as end:
        await stage.watch.poll()
        damage(path)
        stage.hub.seconds.now += 2.9
        await stage.watch.poll()
        await goes_through(end)
        stage.hub.seconds.now += 0.1
        await stage.watch.poll()
        await stage.watch.poll()
        assert not stage.hub.freshness.is_fresh()
        assert await code_of(stage.call(node)) == "E_INTERNAL"
        principal = stage.hub.authenticator.identify(stage.hub.token())
        with pytest.raises(ToolError, match="cannot read what has been revoked"):
            stage.gateway.charge(principal, 1)  # as for a list of tools, or a resource
        write_atomic(path, whole, 0o600)  # as an editor does
        await stage.watch.poll()
        assert stage.hub.freshness.is_fresh()
        await goes_through(end)
    (line,) = stage.hub.lines.entries("the ledgers cannot be read; calls are refused")
    assert line["level"] == "error"
    assert line["unread"] == [SOURCE[name]]
    assert len(stage.hub.lines.entries("the ledgers can be read again; calls are made")) == 1
    stage.hub.refusals.write()
    [refusals] = [line for line in stage.hub.audited() if line.get("event") == "call_refused"]
    assert (refusals["reason"], refusals["count"]) == ("E_INTERNAL", 2)


async def test_a_ledger_whose_disk_hangs_is_one_that_cannot_be_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.revoke_token("jti-1")
    answers = Event()
    jtis = RevokedTokens.jtis

    def hanging(self: RevokedTokens) -> frozenset[str]:
        assert answers.wait(BOUND_S)
        return jtis(self)

    monkeypatch.setattr(RevokedTokens, "jtis", hanging)
    looking = asyncio.create_task(stage.watch.poll())
    stage.hub.seconds.now += 3
    await asyncio.sleep(0)
    assert not stage.hub.freshness.is_fresh()
    answers.set()
    await asyncio.wait_for(looking, BOUND_S)
    assert stage.hub.freshness.is_fresh()


async def test_a_ledger_that_has_not_changed_counts_without_the_event_loop_and_a_changed_one_does_not(
    stage: Stage,
) -> None:
    await stage.watch.poll()
    stage.hub.seconds.now += 3
    assert not stage.hub.freshness.is_fresh()
    stage.watch.look()
    assert stage.hub.freshness.is_fresh()
    stage.revoke_token("jti-1")
    stage.hub.seconds.now += 3
    stage.watch.look()
    assert not stage.hub.freshness.is_fresh()
    await stage.watch.poll()
    assert stage.hub.freshness.is_fresh()


async def test_a_ca_that_was_restored_from_an_older_backup_readmits_no_node(stage: Stage) -> None:
    node = stage.real.node()
    stage.hub.announce(node)
    ledger = stage.directory / "ca" / "ledger.jsonl"
    before = ledger.read_bytes()
    stage.real.as_operator().revoke(NODE_ID)
    await stage.watch.poll()
    write_atomic(ledger, before, 0o600)
    await stage.watch.poll()
    stage.hub.announce(node, issued_at_ms=stage.hub.clock.advance(1))
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED
    (line,) = stage.hub.lines.entries("revoked certificates are missing from the ledger")
    assert (line["level"], line["count"]) == ("error", 1)


async def test_what_could_not_be_read_for_a_moment_takes_effect_as_soon_as_it_can(stage: Stage) -> None:
    node = stage.real.node()
    stage.hub.announce(node)
    await stage.watch.poll()
    stage.real.as_operator().revoke(NODE_ID)
    ledger = stage.directory / "ca" / "ledger.jsonl"
    whole = ledger.read_bytes()
    in_the_way = ledger.rename(ledger.with_suffix(".aside"))
    ledger.mkdir()  # there, but not to be read
    await stage.watch.poll()
    assert failure(stage.hub, node) is None
    ledger.rmdir()
    in_the_way.rename(ledger)  # the same file as before, not changed again
    await stage.watch.poll()
    assert ledger.read_bytes() == whole
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED


async def test_a_look_that_fails_is_tried_again_without_another_change(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = stage.real.node()
    stage.hub.announce(node)
    await stage.watch.poll()
    stage.real.as_operator().revoke(NODE_ID)
    with monkeypatch.context() as patch:

        def no_descriptor() -> CaRecords:
            raise OSError(24, "Too many open files")

        patch.setattr(stage.real.ca, "records", no_descriptor)
        await stage.watch.poll()
        assert failure(stage.hub, node) is None
    await stage.watch.poll()
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED
