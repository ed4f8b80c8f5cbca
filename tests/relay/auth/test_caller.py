"""What is kept of a request's caller."""

from dataclasses import replace

import pytest

from relay.auth.agent_tokens import Principal
from relay.auth.caller import Caller

PRINCIPAL = Principal(
    tenant="acme",
    sub="agent-1",
    jti="jti-1",
    issuer="https://relay.example",
    scopes=frozenset(),
    expires_s=1,
    kid="k",
    key=bytes(32),
)


def test_a_digest_is_the_same_for_every_token_of_an_agent_and_another_for_any_other() -> None:
    assert replace(PRINCIPAL, jti="jti-2", kid="l").digest == PRINCIPAL.digest
    others = [
        replace(PRINCIPAL, sub="agent-2"),
        replace(PRINCIPAL, tenant="acmea", sub="gent-1"),
        replace(PRINCIPAL, issuer="https://relay.exampl", tenant="eacme"),
    ]
    assert len({PRINCIPAL.digest, *(other.digest for other in others)}) == 4
    assert len(PRINCIPAL.digest) == 64


@pytest.mark.parametrize(
    ("headers", "trace"),
    [
        pytest.param({b"traceparent": "00-ab-cd-01"}, "00-ab-cd-01", id="as it was sent"),
        pytest.param({b"tracestate": "x"}, None, id="none"),
    ],
)
def test_the_trace_is_the_requests_own(headers: dict[bytes, str], trace: str | None) -> None:
    caller = Caller(PRINCIPAL, "http", headers)
    assert caller.traceparent == trace
    assert (caller.query, caller.size) == ("", 0)
