"""Attacker: one who wants a token to be read that others do not see, or to be seen that is not read.
Tried: a good token in the query, in a cookie, in headers of proxies, and in two Authorization headers, one
of them bad.

What must happen: 401 that names no error (for no credentials were sent as they must be), and nothing called.
What was merely not sent is not in the audit; two Authorization headers are no client's mistake, and are.
"""

import pytest

from tests.fakes.served_relay import HERE, ServedRelay

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("name", ["access_token", "token", "bearer", "authorization", "Authorization"])
async def test_a_token_in_the_query_is_no_token(relay: ServedRelay, name: str) -> None:
    reply = await relay.mcp("tools/list", path=f"/mcp?{name}={relay.hub.token()}")
    assert reply.status == 401
    assert reply.headers["www-authenticate"].startswith("Bearer scope=")
    assert "error=" not in reply.headers["www-authenticate"]
    assert relay.refusals() == []
    assert relay.calls() == []


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("Cookie", "access_token={}"),
        ("Proxy-Authorization", "Bearer {}"),
        ("X-Forwarded-Authorization", "Bearer {}"),
        ("X-Authorization", "Bearer {}"),
        ("X-Api-Key", "{}"),
        ("Sec-WebSocket-Protocol", "bearer, {}"),
        ("Authorization", "{}"),
        ("Authorization", "Token {}"),
        ("Authorization", "Basic {}"),
        ("Authorization", "Bearer\xa0{}"),
        ("Authorization", "Bearer{}"),
    ],
)
async def test_a_token_in_another_header_or_under_another_word_is_no_token(
    relay: ServedRelay, name: str, form: str
) -> None:
    reply = await relay.mcp("tools/list", headers=[(name, form.format(relay.hub.token()))])
    assert reply.status == 401
    assert "error=" not in reply.headers["www-authenticate"]
    assert relay.refusals() == []
    assert relay.calls() == []


async def test_a_token_in_the_body_is_no_token(relay: ServedRelay) -> None:
    body = f"access_token={relay.hub.token()}".encode()
    form = ("Content-Type", "application/x-www-form-urlencoded")
    assert (await relay.ask("POST /mcp", [form], body)).status == 401
    assert relay.refusals() == []


def doubled(relay: ServedRelay, which: str) -> list[tuple[str, str]]:
    good, bad = f"Bearer {relay.hub.token()}", "Bearer x"
    values = {"good, bad": [good, bad], "bad, good": [bad, good], "good, good": [good, good]}[which]
    return [("Authorization", value) for value in values]


@pytest.mark.parametrize("which", ["good, bad", "bad, good", "good, good"])
async def test_two_tokens_are_no_token(relay: ServedRelay, which: str) -> None:
    reply = await relay.mcp("tools/list", headers=doubled(relay, which))
    assert reply.status == 401
    assert "error=" not in reply.headers["www-authenticate"]
    assert relay.calls() == []


async def test_two_tokens_in_one_header_are_a_bad_one(relay: ServedRelay) -> None:
    token = relay.hub.token()
    reply = await relay.mcp("tools/list", token=f"{token}, Bearer {token}")
    assert reply.status == 401
    assert relay.refusals() == [("token_refused", HERE, "malformed", 1)]


async def test_two_tokens_stand_in_the_audit(relay: ServedRelay) -> None:
    await relay.mcp("tools/list", headers=doubled(relay, "good, bad"))
    assert [line[0] for line in relay.refusals()] == ["token_refused"]
