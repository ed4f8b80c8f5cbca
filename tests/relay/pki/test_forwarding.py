"""What the relay with the CA's key does for the others: with a real CA, and asked as by another relay."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from relay.pki.relay_tls import public_key_pem
from relay.pki.roots import make_server_key
from relay.routing.authority_port import AuthorityAction, AuthorityRefusedError
from schemas.certificates import RELAY_NAME, private, relay_name, verify_relay
from schemas.identity import first_certificate_in, kid_of
from tests.fakes.authority import CSR, Holder
from tests.fakes.disk import full_disk
from tests.fakes.enrolling import HOUR_S, request_of
from tests.fakes.hub import Hub
from tests.fakes.signer import DAY_MS, NODE_ID, OTHER_NODE_ID, TENANT, key_named

ASKING = "01HZX9K3M4P7Q8R9S0T1V2W3XB"


class Stage(Holder):
    """The service, asked as by another relay."""

    async def answer(self, action: AuthorityAction, **members: Any) -> Mapping[str, Any]:
        return await self.service.answer(ASKING, action, members)

    async def refusal(self, action: AuthorityAction, **members: Any) -> AuthorityRefusedError:
        with pytest.raises(AuthorityRefusedError) as refused:
            await self.answer(action, **members)
        return refused.value


@pytest.fixture
def stage(hub: Hub, tmp_path: Path) -> Stage:
    return Stage.below(tmp_path, hub)


# --- enrolment


async def test_why_a_node_is_not_enrolled_is_told_and_counted_for_the_relay_that_asks(
    stage: Stage,
) -> None:
    token = stage.join_tokens.create(TENANT, HOUR_S, 1, stage.ca.root_pem())
    stage.join_tokens.revoke(token.id)
    refused = await stage.refusal(AuthorityAction.ENROL, request=request_of(token))
    assert refused.reason == "unknown_token"
    stage.hub.refusals.write()
    (line,) = stage.hub.audited()
    assert (line["event"], line["reason"]) == ("enrolment_refused", "unknown_token")
    assert f"relay {ASKING}" in line.values()


# --- renewal and retirement


async def test_a_leaf_that_is_not_the_nodes_or_does_not_count_renews_and_retires_nothing(
    stage: Stage,
) -> None:
    held = stage.half_used_leaf()
    asked = {"kid": held.kid, "csr": CSR, "server_roots": False}
    for members in (
        asked | {"node_id": OTHER_NODE_ID},
        asked | {"node_id": NODE_ID, "kid": "ab" * 32},
    ):
        for action in (AuthorityAction.RENEW, AuthorityAction.RETIRE):
            assert (await stage.refusal(action, **members)).reason == "attestation_failed"
    stage.hub.clock.advance(60 * DAY_MS)  # it has ended
    for action in (AuthorityAction.RENEW, AuthorityAction.RETIRE):
        assert (await stage.refusal(action, node_id=NODE_ID, **asked)).reason == "attestation_failed"
    assert stage.ca.revoked_kids() == frozenset()


# --- certificates of relays


def wanted(use: str) -> Mapping[str, str]:
    return {"use": use, "public_key": public_key_pem(make_server_key(os.urandom).public_key())}


async def test_a_relay_gets_a_certificate_to_serve_with_which_the_audit_has(stage: Stage) -> None:
    answer = await stage.answer(AuthorityAction.CERTIFY, **wanted("serve"))
    assert answer["certificate"].startswith("-----BEGIN CERTIFICATE-----")
    assert [each.name for each in stage.ca.records().issued.values()] == [RELAY_NAME]
    (line,) = stage.hub.audited()
    assert (line["event"], line["relay"], line["use"]) == ("relay_certified", ASKING, "serve")


async def test_what_names_a_relay_is_renewed_for_that_relay_and_for_no_other(stage: Stage) -> None:
    ours, other = (key_named(name) for name in ("a relay", "another relay"))
    asked = {"use": "cluster", "public_key": public_key_pem(private(ours).public_key())}
    # The process that asks is not proven; or another relay is.
    for asking in (ASKING, relay_name(bytes(other.verify_key))):
        with pytest.raises(AuthorityRefusedError):
            await stage.service.answer(asking, AuthorityAction.CERTIFY, asked)
    with pytest.raises(AuthorityRefusedError):
        await stage.service.answer(ASKING, AuthorityAction.CERTIFY, asked | {"public_key": "none"})
    assert not stage.ca.records().issued
    name = relay_name(bytes(ours.verify_key))
    renewed = (await stage.service.answer(name, AuthorityAction.CERTIFY, asked))["certificate"]
    assert verify_relay(first_certificate_in(renewed), stage.ca.roots(), stage.hub.clock()).name == name
    assert [each.kid for each in stage.ca.records().of_relay(name)] == [kid_of(first_certificate_in(renewed))]


async def test_on_a_full_disk_no_certificate_is_given(stage: Stage) -> None:
    with full_disk():
        assert (await stage.refusal(AuthorityAction.CERTIFY, **wanted("serve"))).reason == "internal"


async def test_a_fault_of_the_ca_is_logged_here_and_named_to_no_other_relay(stage: Stage) -> None:
    (stage.ca.root_file.parent / "ledger.jsonl").write_text("damaged\n")
    refused = await stage.refusal(AuthorityAction.CERTIFY, **wanted("serve"))
    assert refused.reason == "internal"
    (line,) = stage.hub.lines.entries("the CA cannot do what another relay asks")
    assert "ledger.jsonl is damaged" in line["reason"]
