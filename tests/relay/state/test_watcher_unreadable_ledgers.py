"""Ledgers that are damaged, unreadable or restored: nothing in effect changes, and calls are refused."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from relay.state.certificates import CaRecords
from relay.state.kinds import CERTIFICATES, NODE_NAMES, REVOKED_TOKENS, VERIFYING_KEYS
from relay.state.tokens import RevokedTokens
from schemas.errors import Failure, ToolError
from schemas.files import write_atomic
from schemas.tokens import TokenError
from tests.fakes.node_end import NodeEnd
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID
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

SOURCE = {
    "ca/ledger.jsonl": CERTIFICATES.name,
    "ca/root.pem": CERTIFICATES.name,
    "revoked_tokens.jsonl": REVOKED_TOKENS.name,
    "token_keys.jsonl": VERIFYING_KEYS.name,
    "node_names.jsonl": NODE_NAMES.name,
}
"""What each file is called in the log."""


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param("ca/ledger.jsonl", torn, id="the CA's ledger"),
        pytest.param("ca/root.pem", emptied, id="the root"),
        pytest.param("revoked_tokens.jsonl", torn, id="the list of tokens"),
        pytest.param("token_keys.jsonl", torn, id="the keys of tokens"),
        pytest.param("node_names.jsonl", torn, id="the nodes' names"),
    ],
)
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
    stage.watch.confirm_unchanged()
    assert stage.hub.freshness.is_fresh()
    stage.revoke_token("jti-1")
    stage.hub.seconds.now += 3
    stage.watch.confirm_unchanged()
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
