"""What must not come about between a client and the authorization server: codes, tokens and redirects."""

import asyncio
import threading
from urllib.parse import quote

import pytest

from relay.sign_in import service
from relay.sign_in.authorization import OF_A_PERSON
from relay.sign_in.redirects import is_registered, target_of
from relay.state.grants import MAX_ACCESS, MAX_LIVE
from relay.state.tokens import IssuedToken, IssuedTokens
from tests.fakes.disk import full_disk
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.person import Browser, answered
from tests.fakes.polling import BOUND_S
from tests.relay.sign_in.conftest import LOOPBACK, VERIFIER, Stage


@pytest.mark.parametrize(
    "uri",
    [
        "https://client.example@evil.example/callback",
        "https://client.example/callback#x",
        "https://client.example/callback/",
        "https://client.example/callback?x=1",
        "https://client.example/%63allback",
        "https://client.example%2Fcallback",
        "https://client.example:8443/callback",
        "https://client.example.evil.example/callback",
        "https://CLIENT.example/callback",
        "https://cIient.example/callback",
        "http://client.example/callback",
        "https://client.example/callback/../evil",
        "//client.example/callback",
        "https:\\\\client.example\\callback",
        "https://client.example/callback\n",
        "",
        "javascript:alert(1)//https://client.example/callback",
    ],
)
async def test_a_redirect_is_one_that_was_registered_letter_by_letter(stage: Stage, uri: str) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    await stage.registered("https://other.example/x")
    answer = await ada.get(stage.query(client_id, uri))
    assert answer.status_code == 400
    assert "location" not in answer.headers


@pytest.mark.parametrize(
    ("uri", "good"),
    [
        ("http://127.0.0.1:1/callback", True),
        ("http://127.0.0.1/callback", True),
        ("http://localhost:1/callback", False),
        ("http://[::1]:1/callback", False),
        ("http://127.0.0.1:1/other", False),
        ("http://127.0.0.1:1/callback?x", False),
        ("http://127.0.0.1:99999999/callback", False),
        ("http://127.0.0.1:1@evil.example/callback", False),
        ("http://127.0.0.1.evil.example/callback", False),
        ("http://localhost.evil.example:1/callback", False),
        ("http://127.1:1/callback", False),
        ("http://2130706433/callback", False),
        ("https://127.0.0.1:1/callback", False),
    ],
)
def test_of_loopback_the_port_alone_may_differ(uri: str, good: bool) -> None:  # noqa: FBT001 - a table
    assert is_registered(uri, ["http://127.0.0.1/callback"]) is good


@pytest.mark.parametrize(
    "uri",
    [
        "javascript:alert(1)",
        "data:text/html,x",
        "file:///etc/passwd",
        "http://192.168.1.5/callback",
        "https://127.0.0.1/callback",
        "https://[2001:db8::1]/callback",
        "https://single/callback",
        "https://user@client.example/",
        "ftp://client.example/",
        "evil:callback",
        "https://client.example/" + "x" * 600,
        "https://clie\u0301nt.example/",
    ],
)
def test_where_no_code_is_ever_sent(uri: str) -> None:
    assert target_of(uri) is None


@pytest.mark.parametrize(
    "without",
    [
        {"code_challenge": None, "code_challenge_method": None},
        {"code_challenge_method": "plain"},
        {"code_challenge_method": None},
        {"code_challenge": "short"},
        {"response_type": "token"},
        {"response_type": "code token"},
        {"resource": "https://another-hub.example/mcp"},
        {"resource": f"{PUBLIC_URL}.evil.example/mcp"},
        {"scope": "a\tb"},
        {"state": "s" * 5000},
    ],
    ids=str,
)
async def test_what_lacks_a_part_is_refused(stage: Stage, without: dict[str, str | None]) -> None:
    """PKCE downgrade, implicit flow, the audience of another hub."""
    ada = await stage.person()
    client_id = await stage.registered(LOOPBACK)
    answer = answered(await ada.get(stage.query(client_id, LOOPBACK, **without)))
    assert "code" not in answer
    assert (answer["error"] == "unsupported_response_type") is ("response_type" in without)
    assert answer["iss"] == PUBLIC_URL


@pytest.mark.parametrize(
    "wrong", [{"scope": "a\tb"}, {"scope": '"'}, {"response_type": "token"}, {"code_challenge": None}]
)
async def test_a_browser_is_not_sent_where_a_stranger_has_registered_for_by_an_error(
    stage: Stage, wrong: dict[str, str | None]
) -> None:
    """Open redirect: any stranger can register such a client, and make a link of this relay to his place."""
    ada, client_id = await stage.person(), await stage.registered("https://evil.example/")
    for browser, status in ((ada, 400), (Browser(stage.http, PUBLIC_URL), 200)):
        answer = await browser.get(stage.query(client_id, "https://evil.example/", **wrong))
        assert answer.status_code == status
        assert "location" not in answer.headers
        assert "evil.example" not in answer.text


@pytest.mark.parametrize("name", ["client_id", "redirect_uri", "state", "code_challenge", "response_type"])
async def test_a_parameter_that_is_sent_twice_is_refused(stage: Stage, name: str) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    answer = await ada.get(f"{stage.query(client_id)}&{name}={quote('x')}")
    assert answer.status_code == 400


@pytest.mark.parametrize(
    "changed",
    [
        {"code_verifier": "w" * 43},
        {"code_verifier": None},
        {"code_verifier": VERIFIER + "\n"},
        {"redirect_uri": "https://client.example/other"},
        {"client_id": "another"},
        {"resource": f"{PUBLIC_URL}/mcp/tools"},
        {"resource": "https://another-hub.example/mcp"},
        {"client_secret": "x"},
        {"grant_type": "client_credentials"},
        {"grant_type": "password"},
    ],
    ids=str,
)
async def test_a_code_is_bound_to_what_it_was_given_for(stage: Stage, changed: dict[str, str | None]) -> None:
    """Injection of a code, and mix-up; one that was tried wrongly is used up."""
    ada, client_id = await stage.person(), await stage.registered()
    code = await stage.code(ada, client_id)
    answer = await stage.token(**{"code": code, "client_id": client_id} | changed)
    assert answer.status_code in {400, 401}
    assert set(answer.json()) == {"error", "error_description"}
    assert answer.headers["cache-control"] == "no-store"


async def test_a_code_tried_with_a_wrong_verifier_is_used_up(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    code = await stage.code(ada, client_id)
    assert (await stage.token(code=code, client_id=client_id, code_verifier="w" * 43)).status_code == 400
    assert (await stage.token(code=code, client_id=client_id)).status_code == 400


async def test_a_code_of_another_client_is_not_redeemed(stage: Stage) -> None:
    ada, mine = await stage.person(), await stage.registered()
    other = await stage.registered(name="Another")
    code = await stage.code(ada, mine)
    assert (await stage.token(code=code, client_id=other)).json()["error"] == "invalid_grant"


async def test_a_code_ends_after_a_minute(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    code = await stage.code(ada, client_id)
    stage.fake.clock.advance(60_000)
    assert (await stage.token(code=code, client_id=client_id)).json()["error"] == "invalid_grant"


async def test_a_code_that_is_used_twice_ends_what_it_has_become(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    code = await stage.code(ada, client_id)
    first = (await stage.token(code=code, client_id=client_id)).json()
    assert (await stage.token(code=code, client_id=client_id)).json()["error"] == "invalid_grant"
    stage.applied()
    assert not await stage.is_accepted(first["access_token"])
    assert (await stage.refresh(first["refresh_token"], client_id)).status_code == 400
    assert stage.ended() == ["ada/A-Client"]


async def test_a_code_of_which_nothing_came_is_good_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    code = await stage.code(ada, client_id)
    with full_disk():
        full = await stage.token(code=code, client_id=client_id)
    monkeypatch.setattr(service, "_MAX_WAITING", 0)
    too_many = await stage.token(code=code, client_id=client_id)
    monkeypatch.undo()
    assert [full.status_code, too_many.status_code] == [503, 503]
    assert (await stage.token(code=code, client_id=client_id)).status_code == 200


async def test_of_several_that_redeem_a_code_at_once_none_keeps_what_it_gets(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    code = await stage.code(ada, client_id)
    answers = await asyncio.gather(*(stage.token(code=code, client_id=client_id) for _ in range(5)))
    assert sorted(answer.status_code for answer in answers)[1:] == [400, 400, 400, 400]
    stage.applied()
    given = [answer.json()["access_token"] for answer in answers if answer.status_code == 200]
    assert [await stage.is_accepted(token) for token in given] == [False] * len(given)


async def test_a_code_that_is_used_again_while_its_token_is_signed_leaves_no_token(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(ledger: IssuedTokens, token: IssuedToken) -> None:
        signs.set()
        assert go_on.wait(BOUND_S)
        usual(ledger, token)

    signs, go_on, usual = threading.Event(), threading.Event(), IssuedTokens.add
    ada, client_id = await stage.person(), await stage.registered()
    code = await stage.code(ada, client_id)
    monkeypatch.setattr(IssuedTokens, "add", add)
    first = asyncio.create_task(stage.token(code=code, client_id=client_id))
    assert await asyncio.to_thread(signs.wait, BOUND_S)
    again = asyncio.create_task(stage.token(code=code, client_id=client_id))
    for _ in range(1000):
        await asyncio.sleep(0)
    go_on.set()
    token = (await first).json()["access_token"]
    assert (await again).status_code == 400
    stage.applied()
    assert not await stage.is_accepted(token)


async def test_a_refresh_token_that_is_used_after_its_grace_ends_all(stage: Stage) -> None:
    """Somebody has a copy: neither the thief nor the client goes on."""
    ada, client_id = await stage.person(), await stage.registered()
    tokens = await stage.tokens(ada, client_id)
    newer = (await stage.refresh(tokens["refresh_token"], client_id)).json()
    stage.fake.clock.advance(60_000)
    assert (await stage.refresh(tokens["refresh_token"], client_id)).json()["error"] == "invalid_grant"
    assert (await stage.refresh(newer["refresh_token"], client_id)).status_code == 400
    stage.applied()
    assert not await stage.is_accepted(newer["access_token"])
    assert stage.ended() == ["ada/A-Client"]


async def test_a_client_that_refreshes_without_end_waits_and_keeps_what_it_has(stage: Stage) -> None:
    """What it leaves in the relay's files is bounded by time, and so is the work of ending it."""
    ada, client_id = await stage.person(), await stage.registered()
    token = (await stage.tokens(ada, client_id))["refresh_token"]
    for _ in range(MAX_ACCESS - 1):
        stage.fake.clock.advance(1_000)
        token = (await stage.refresh(token, client_id)).json()["refresh_token"]
    refused = await stage.refresh(token, client_id)
    assert refused.status_code == 429
    waits_s = int(refused.headers["retry-after"])
    assert waits_s == 3_600 - (MAX_ACCESS - 1)
    stage.fake.clock.advance(1_000 * waits_s)
    assert (await stage.refresh(token, client_id)).status_code == 200


async def test_one_sign_in_too_many_ends_what_was_not_used_for_longest(
    stage: Stage,
) -> None:
    ada, bob = await stage.person(), await stage.person("bob")
    client_id, of_bob = await stage.registered(), await stage.registered(name="Of Bob")
    kept = await stage.tokens(bob, of_bob)
    tokens = []
    for _ in range(MAX_LIVE):
        stage.fake.clock.advance(1_000)
        tokens.append(await stage.tokens(ada, client_id))
    first = (await stage.refresh(tokens[0]["refresh_token"], client_id)).json()
    stage.fake.clock.advance(1_000)
    newest = await stage.tokens(ada, client_id)
    stage.applied()
    assert stage.ended() == ["ada/A-Client"]
    assert not await stage.is_accepted(tokens[1]["access_token"])
    assert (await stage.refresh(tokens[1]["refresh_token"], client_id)).status_code == 400
    for each in (first, tokens[2], newest):
        assert await stage.is_accepted(each["access_token"])
        assert (await stage.refresh(each["refresh_token"], client_id)).status_code == 200
    assert (await stage.refresh(kept["refresh_token"], of_bob)).status_code == 200


async def test_a_client_that_signs_in_without_end_ends_what_it_has_itself_first(stage: Stage) -> None:
    ada, client_id, other = (
        await stage.person(),
        await stage.registered(),
        await stage.registered(name="Other"),
    )
    used = await stage.tokens(ada, client_id)
    for _ in range(MAX_LIVE):
        await stage.tokens(ada, other)
    assert (await stage.refresh(used["refresh_token"], client_id)).status_code == 200
    assert stage.ended() == ["ada/Other"]


async def test_of_sign_ins_together_no_more_stay_than_may_be(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    for _ in range(MAX_LIVE - 1):
        await stage.tokens(ada, client_id)
    codes = [await stage.code(ada, client_id) for _ in range(4)]
    answers = await asyncio.gather(*(stage.token(code=code, client_id=client_id) for code in codes))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len(stage.relay.grants.read().by_id) == MAX_LIVE
    assert stage.ended() == ["ada/A-Client"] * 3


async def test_a_person_whose_clients_sign_in_and_out_without_end_waits(stage: Stage) -> None:
    """Each token leaves lines that all relays share, and of one that is revoked one for good."""
    ada, bob, client_id = await stage.person(), await stage.person("bob"), await stage.registered()
    for made in range(int(OF_A_PERSON.burst) + 3):  # noqa: B007 - how many, once one is refused
        stage.fake.seconds.now += 0.1
        code = await stage.code(ada, client_id)
        answer = await stage.token(code=code, client_id=client_id)
        if answer.status_code != 200:
            break
        await stage.http.post(
            "/revoke", data={"token": answer.json()["refresh_token"], "client_id": client_id}
        )
    assert (answer.status_code, answer.json()["error"]) == (429, "temporarily_unavailable")
    assert made >= OF_A_PERSON.burst
    stage.fake.seconds.now += int(answer.headers["retry-after"])
    assert (await stage.token(code=code, client_id=client_id)).status_code == 200
    await stage.tokens(bob, client_id)


async def test_the_grace_of_a_refresh_token_is_not_endless(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    token = (await stage.tokens(ada, client_id))["refresh_token"]
    statuses = [(await stage.refresh(token, client_id)).status_code for _ in range(10)]
    assert statuses == [200] * 8 + [400] * 2


async def test_refreshes_that_race_leave_one_generation(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    token = (await stage.tokens(ada, client_id))["refresh_token"]
    answers = await asyncio.gather(*(stage.refresh(token, client_id) for _ in range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len({answer.json()["refresh_token"] for answer in answers}) == 4


@pytest.mark.parametrize("token", ["", "x", "ekr1_", "ekr1_" + "A" * 64, "\u00e9", "ekr1_" + "A" * 100_000])
async def test_what_is_no_refresh_token_is_refused(stage: Stage, token: str) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    await stage.tokens(ada, client_id)
    assert (await stage.refresh(token, client_id)).status_code in {400, 413}


async def test_another_client_cannot_refresh_or_revoke(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    other = await stage.registered(name="Another")
    tokens = await stage.tokens(ada, client_id)
    assert (await stage.refresh(tokens["refresh_token"], other)).status_code == 400
    for token in (tokens["refresh_token"], tokens["access_token"], forged(tokens["access_token"])):
        form = {"token": token, "client_id": other}
        assert (await stage.http.post("/revoke", data=form)).status_code == 200
    form = {"token": forged(tokens["access_token"]), "client_id": client_id}
    assert (await stage.http.post("/revoke", data=form)).status_code == 200
    stage.applied()
    assert await stage.is_accepted(tokens["access_token"])
    assert (await stage.refresh(tokens["refresh_token"], client_id)).status_code == 200


def forged(token: str) -> str:
    """Return an access token with the same claims, that no relay has signed."""
    return token.rpartition(".")[0] + "." + "A" * 86


@pytest.mark.parametrize(
    "headers",
    [
        {"x-forwarded-host": "evil.example"},
        {"forwarded": "host=evil.example;proto=http"},
        {"x-forwarded-proto": "http", "x-forwarded-port": "1"},
        {"x-original-url": "/x", "x-rewrite-url": "/x"},
    ],
    ids=str,
)
async def test_no_header_changes_the_issuer(stage: Stage, headers: dict[str, str]) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    for path in ("/.well-known/oauth-authorization-server", "/.well-known/oauth-protected-resource/mcp"):
        assert "evil" not in (await stage.http.get(path, headers=headers)).text
        assert PUBLIC_URL in (await stage.http.get(path, headers=headers)).text
    challenge = (await stage.http.post("/mcp", headers=headers)).headers["www-authenticate"]
    assert f'resource_metadata="{PUBLIC_URL}/' in challenge
    assert "evil" not in challenge
    answer = answered(await ada.allow(stage.query(client_id)))
    assert answer["iss"] == PUBLIC_URL
    assert (await stage.http.get("/authorize", headers={"host": "evil.example"})).status_code == 421


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"redirect_uris":[]}',
        b'{"redirect_uris":"https://client.example/"}',
        b'{"redirect_uris":[1,null,{}]}',
        b'{"redirect_uris":["http://client.example/"]}',
        b'{"redirect_uris":["https://a.example/"],"redirect_uris":["https://b.example/"]}',
        b'{"redirect_uris":["https://a.example/"],"token_endpoint_auth_method":"private_key_jwt"}',
        b'{"redirect_uris":' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"redirect_uris":["https://a.example/' + b"x" * 20_000 + b'"]}',
    ],
    ids=lambda body: body[:40].decode(),
)
async def test_what_is_no_registration_is_refused(stage: Stage, body: bytes) -> None:
    stage.link()
    answer = await stage.http.post("/register", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in {400, 413}
    assert set(answer.json()) == {"error", "error_description"}


async def test_registrations_leave_nothing_behind(stage: Stage) -> None:
    """A flood of them: the client's id is all that there is of one."""
    stage.link()
    before = {file: file.stat().st_size for file in stage.state.rglob("*") if file.is_file()}
    ids = {await stage.registered(name=f"Client {number}") for number in range(30)}
    after = {file: file.stat().st_size for file in stage.state.rglob("*") if file.is_file()}
    assert len(ids) == 30
    assert after == before


async def test_a_registration_that_was_changed_is_none(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    for forged in (
        client_id[:-2] + "AA",
        client_id[:-1],
        client_id + "A",
        "ekc1_",
        "ekc1_" + "A" * 5000,
        "",
        "x",
    ):
        assert (await ada.get(stage.query(forged))).status_code == 400
