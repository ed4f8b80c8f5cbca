"""What other sites, other people and strangers must not do with a person's browser, link or passkey."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from html import unescape
from types import FrameType
from typing import Any

import httpx2
import pytest
from fido2.cose import ES256

from relay.sign_in import passkeys as passkeys_module
from relay.sign_in.incoming import BODY_TIMEOUT_S
from relay.sign_in.passkeys import PasskeyError, Passkeys
from relay.state.people import PersonRole
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.person import Authenticator, Browser, form_value
from tests.fakes.seconds import LoopSeconds
from tests.relay.sign_in.conftest import Stage, asking

SECRET_COOKIE = "__Host-edge-session"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "https://sub.relay.example"},
        {"origin": "http://relay.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
async def test_no_other_site_can_send_our_forms(stage: Stage, headers: dict[str, str]) -> None:
    """CSRF: neither consent, nor the end of a grant, nor a sign-in as somebody else (login CSRF)."""
    ada = await stage.person()
    query = stage.query(await stage.registered())
    form = {"form": form_value((await ada.get(query)).text), "decision": "allow", "lifetime": "month"}
    form["choice"] = "look_without_logs"
    assert (await ada.post_form(query, form, **headers)).status_code == 403
    assert (await ada.post_form("/sign-out", form, **headers)).status_code == 403
    options = (await ada.post_json("/sign-in/options", {})).json()
    proof = {"credential": ada.authenticator.get(options)}
    ada.cookies.clear()
    assert (await ada.post_json("/sign-in/passkey", proof, **headers)).status_code == 403
    assert ada.cookies == {}


async def test_a_form_without_an_origin_is_none_of_ours(stage: Stage) -> None:
    ada = await stage.person()
    query = stage.query(await stage.registered())
    form = {"form": form_value((await ada.get(query)).text), "decision": "allow"}
    cookie = f"{SECRET_COOKIE}={ada.cookies[SECRET_COOKIE]}"
    assert (await stage.http.post(query, data=form, headers={"cookie": cookie})).status_code == 403


async def test_a_form_that_was_shown_to_another_is_refused(stage: Stage) -> None:
    ada, bob = await stage.person(), await stage.person("bob")
    query = stage.query(await stage.registered())
    form = {"form": form_value((await bob.get(query)).text), "choice": "look_without_logs", "lifetime": "day"}
    for forged in (form, form | {"form": ""}, form | {"form": "x" * 22}):
        assert (await ada.post_form(query, forged | {"decision": "allow"})).status_code == 403


@pytest.mark.parametrize("path", ["/sign-in", "/invitation", "query"])
async def test_no_page_can_be_framed_or_loads_what_is_not_ours(stage: Stage, path: str) -> None:
    """Clickjacking."""
    ada = await stage.person()
    page = await ada.get(stage.query(await stage.registered()) if path == "query" else path)
    policy = page.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert page.headers["x-frame-options"] == "DENY"
    assert page.headers["cache-control"] == "no-store"
    assert "<script>" not in page.text
    assert " style=" not in page.text
    assert " on" not in re.sub(r">[^<]*<", "><", page.text)


async def test_a_session_begins_anew_with_each_sign_in(stage: Stage) -> None:
    """Session fixation: a cookie that an attacker has set is worth nothing after the sign-in."""
    ada = await stage.person()
    mallory = await stage.person("mallory")
    ada.cookies = dict(mallory.cookies)
    await ada.sign_in()
    assert ada.cookies != mallory.cookies
    assert "Signed in as ada" in (await ada.get("/sign-in")).text
    assert "Signed in as" not in (await mallory.get("/sign-in")).text


async def test_a_cookie_that_a_sibling_domain_could_set_is_not_read(stage: Stage) -> None:
    ada = await stage.person()
    value = ada.cookies[SECRET_COOKIE]
    for cookie in (f"edge-session={value}", f"{SECRET_COOKIE}={value}; {SECRET_COOKIE}={value}"):
        page = await stage.http.get("/sign-in", headers={"cookie": cookie})
        assert "Signed in as" not in page.text, cookie


async def test_the_cookie_is_for_this_host_over_tls_alone(stage: Stage) -> None:
    ada = Browser(stage.http, PUBLIC_URL)
    made = await ada.accept_invitation(stage.link())
    flags = {part.strip().lower() for part in made.headers["set-cookie"].split(";")[1:]}
    assert {"secure", "httponly", "samesite=lax", "path=/"} <= flags
    assert not any(flag.startswith("domain") for flag in flags)


async def test_a_link_is_used_by_its_passkey_and_not_by_a_preview(stage: Stage) -> None:
    link = stage.link()
    for _ in range(3):
        assert (await stage.http.get("/invitation")).status_code == 200
    secret = link.partition("#")[2]
    assert (
        await Browser(stage.http, PUBLIC_URL).post_json("/invitation/options", {"link": secret})
    ).is_success
    assert (await Browser(stage.http, PUBLIC_URL).accept_invitation(link)).status_code == 200
    second = await Browser(stage.http, PUBLIC_URL).accept_invitation(link)
    assert second.status_code == 403
    assert "ask the operator for another" in second.json()["message"]


async def test_a_link_that_two_open_at_once_makes_one_passkey(stage: Stage) -> None:
    secret = stage.link().partition("#")[2]
    two = [Browser(stage.http, PUBLIC_URL) for _ in range(2)]
    options = [(await each.post_json("/invitation/options", {"link": secret})).json() for each in two]
    answers = [
        await each.post_json(
            "/invitation/passkey", {"link": secret, "credential": each.authenticator.create(option)}
        )
        for each, option in zip(two, options, strict=True)
    ]
    assert [answer.status_code for answer in answers] == [200, 403]


async def test_a_passkey_with_the_id_of_another_persons_is_not_made(stage: Stage) -> None:
    ada = await stage.person()
    mallory = Browser(stage.http, PUBLIC_URL)
    mallory.authenticator.id = ada.authenticator.id
    assert (await mallory.accept_invitation(stage.link("mallory"))).status_code == 403
    assert (await ada.sign_in()).status_code == 200


async def test_a_link_ends_after_an_hour(stage: Stage) -> None:
    link = stage.link()
    stage.fake.clock.advance(3_600_000)
    assert (await Browser(stage.http, PUBLIC_URL).accept_invitation(link)).status_code == 403


def _of_another_origin(ada: Authenticator) -> None:
    ada.origin = "https://relay.example.evil.example"


def _not_verified(ada: Authenticator) -> None:
    ada.flags = 0x01


def _of_another_site(ada: Authenticator) -> None:
    ada.rp_id = "evil.example"


def _another_key(ada: Authenticator) -> None:
    other = Authenticator(PUBLIC_URL)
    ada.key = other.key


def _unknown(ada: Authenticator) -> None:
    ada.id = bytes(32)


def _of_another_person(ada: Authenticator) -> None:
    ada.user = b"somebody else"


@pytest.mark.parametrize(
    "forge", [_of_another_origin, _not_verified, _of_another_site, _another_key, _unknown, _of_another_person]
)
async def test_a_passkey_that_does_not_prove_its_owner(
    stage: Stage, forge: Callable[[Authenticator], None]
) -> None:
    """Every refusal is the same: who asks does not learn which passkeys, or people, there are."""
    ada = await stage.person()
    ada.cookies.clear()
    forge(ada.authenticator)
    refused = await ada.sign_in()
    assert refused.status_code == 403
    assert refused.json() == {
        "error": "not proven",
        "message": "This passkey is not known here, or was not used in time.",
    }
    assert ada.cookies == {}


async def test_a_try_takes_the_same_way_whether_or_not_its_passkey_is_known(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """User enumeration by time: the lines that run are the same, and so is what is verified."""
    ada = await stage.person()
    now_ms, verified, verify = stage.fake.environment.now_ms, list[str](), ES256.verify

    def counted(key: ES256, message: bytes, signature: bytes) -> None:
        verified.append(type(key).__name__)
        verify(key, message, signature)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(ES256, "verify", counted)
    passkeys = Passkeys(
        public_url=PUBLIC_URL, people=stage.relay.people, now_ms=now_ms, random_bytes=os.urandom
    )
    ways = list[list[int]]()
    for forge in (_another_key, _unknown):
        forge(ada.authenticator)
        with lines_of(passkeys_module.__file__) as lines, pytest.raises(PasskeyError, match="not proven"):
            passkeys.proven(ada.authenticator.get(passkeys.request()))
        ways.append(lines)
    assert verified == ["ES256", "ES256"]
    assert ways[0] == ways[1] != []


@contextmanager
def lines_of(file: str) -> Iterator[list[int]]:
    """Note the lines of ``file`` that run meanwhile, in order."""
    lines, before = list[int](), sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != file:
            return None
        if event == "line":
            lines.append(frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


async def test_a_proof_is_good_once_and_for_minutes(stage: Stage) -> None:
    ada = await stage.person()
    options = (await ada.post_json("/sign-in/options", {})).json()
    proof = {"credential": ada.authenticator.get(options)}
    assert (await ada.post_json("/sign-in/passkey", proof)).status_code == 200
    assert (await ada.post_json("/sign-in/passkey", proof)).status_code == 403
    late = (await ada.post_json("/sign-in/options", {})).json()
    stage.fake.clock.advance(300_000)
    assert (
        await ada.post_json("/sign-in/passkey", {"credential": ada.authenticator.get(late)})
    ).status_code == 403


async def test_a_challenge_for_making_a_passkey_proves_none(stage: Stage) -> None:
    ada = await stage.person()
    options = (await ada.post_json("/invitation/options", {"link": stage.link().partition("#")[2]})).json()
    proof = {"credential": ada.authenticator.get(options)}
    assert (await ada.post_json("/sign-in/passkey", proof)).status_code == 403


@pytest.mark.parametrize(
    "value",
    [{}, [], "x", {"credential": None}, {"credential": {}}, {"credential": {"id": 1, "response": "x"}}],
)
async def test_what_is_no_proof_is_refused_in_one_line(stage: Stage, value: object) -> None:
    ada = await stage.person()
    answer = await ada.post_json("/sign-in/passkey", value)
    assert answer.status_code in {400, 403}
    assert answer.json()["message"]


async def test_an_agents_token_opens_no_page_of_people(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    token = (await stage.tokens(ada, client_id))["access_token"]
    headers = {"authorization": f"Bearer {token}", "origin": PUBLIC_URL}
    assert "Signed in as" not in (await stage.http.get("/sign-in", headers=headers)).text
    assert "Sign in with a passkey" in (await stage.http.get(stage.query(client_id), headers=headers)).text
    form = {"decision": "allow", "choice": "look_without_logs", "lifetime": "day", "form": ""}
    assert (await stage.http.post(stage.query(client_id), data=form, headers=headers)).status_code == 403


@pytest.mark.parametrize(
    "more",
    [
        {"scope": ["tools:call:read_only", "tools:call:reversible"]},
        {"scope": "tools:call:physical_actuation"},
        {"scope": "sessions:message"},
        {"kind": "linux.journal"},
        {"kind": "*"},
        {"board": "tag:another"},
        {"tenant": "another"},
        {"choice": "look"},
        {"lifetime": "century"},
        {"scope": []},
    ],
    ids=str,
)
async def test_a_member_gives_no_more_than_the_page_offers(stage: Stage, more: dict[str, object]) -> None:
    bob = await stage.person("bob", PersonRole.MEMBER)
    usual = {"choice": "chosen", "scope": "tools:call:read_only", "kind": "system.echo"}
    refused = await bob.allow(stage.query(await stage.registered()), **usual | more)
    assert refused.status_code == 400
    assert 'role="alert"' in refused.text


async def test_all_of_a_revoked_person_ends(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    code = await stage.code(ada, client_id)
    tokens = await stage.tokens(ada, client_id)
    stage.relay.watcher.begin()
    stage.relay.people.revoke("ada")
    await stage.relay.watcher.poll()
    assert '"event":"person_revoked","sub":"ada"' in (stage.state / "audit.jsonl").read_text("ascii")
    assert (await stage.refresh(tokens["refresh_token"], client_id)).status_code == 400
    assert (await stage.token(code=code, client_id=client_id)).status_code == 400
    assert "Signed in as" not in (await ada.get("/sign-in")).text
    assert (await ada.sign_in()).status_code == 403


async def test_hostile_names_of_clients_are_text(stage: Stage) -> None:
    ada = await stage.person()
    hostile = "<script>alert(1)</script>\u202e\x00'\"><img src=x onerror=alert(1)>" + "x" * 500
    client_id = await stage.registered(name=hostile)
    for page in (
        (await ada.get(stage.query(client_id))).text,
        (await stage.http.get(stage.query(client_id))).text,
    ):
        assert "<script>alert" not in page
        assert "<img" not in page
        assert "\u202e" not in page
    assert (await stage.tokens(ada, client_id))["access_token"]
    assert "<img" not in (await ada.get("/sign-in")).text


async def test_a_client_that_calls_itself_like_a_known_one_is_called_out(stage: Stage) -> None:
    ada = await stage.person()
    page = (await ada.get(stage.query(await stage.registered(name="Cl\u00e0ude  Code")))).text
    assert "anyone can use this name" in page
    for name in ("My CLAUDE-code", "Cl\u0430ud\u0435 Code"):  # of Cyrillic letters, two
        page = (await ada.get(stage.query(await stage.registered(name=name)))).text
        assert "calls itself like Claude" in unescape(page)


async def test_consent_is_not_skipped_for_who_cannot_prove_itself(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    await stage.code(ada, client_id, remember="yes")
    await stage.tokens(ada, client_id, remember="yes")
    assert 'name="decision"' in (await ada.get(stage.query(client_id))).text


async def test_too_many_requests_of_one_address_are_refused_before_they_are_read(stage: Stage) -> None:
    stage.link()
    statuses = []
    for _ in range(500):
        answer = await stage.http.post("/register", content=b"{" * 1000)
        statuses.append(answer.status_code)
        if answer.status_code == 429:
            break
    assert statuses[0] == 415
    assert statuses[-1] == 429
    assert int(answer.headers["retry-after"]) >= 1


async def status_after(ask: Callable[[], Awaitable[httpx2.Response]], most: int) -> tuple[int, int]:
    """Return how many requests were answered before one was refused for the rate, and the last status."""
    for number in range(most):
        if (answer := await ask()).status_code == 429:
            return number, 429
    return most, answer.status_code


async def test_others_tries_do_not_shut_out_an_address_from_which_a_person_has_signed_in(
    stage: Stage,
) -> None:
    """From there that person has a limit of its own, until it is revoked; elsewhere all share one."""
    async with asking(stage.relay, "203.0.113.7") as home, asking(stage.relay, "203.0.113.8") as elsewhere:
        ada = Browser(home, PUBLIC_URL)
        assert (await ada.accept_invitation(stage.link())).status_code == 200
        for number in range(20):
            async with asking(stage.relay, f"198.51.100.{number}") as stranger:
                tries = partial(
                    Browser(stranger, PUBLIC_URL).post_json, "/sign-in/passkey", {"credential": {}}
                )
                last = await status_after(tries, 39)
        assert last == (0, 429)  # the limit of all together
        ada.http = elsewhere
        assert (await ada.sign_in()).status_code == 429
        ada.http = home
        assert (await ada.sign_in()).status_code == 200
        _, status = await status_after(ada.sign_in, 100)
        assert status == 429  # its own limit
        stage.fake.seconds.now += 3600
        assert (await ada.sign_in()).status_code == 200
        for number in range(20):
            async with asking(stage.relay, f"198.51.100.{number}") as stranger:
                last = await status_after(partial(stranger.get, "/sign-in"), 39)
        assert last == (0, 429)
        stage.relay.people.revoke("ada")
        assert (await ada.get("/sign-in")).status_code == 429


async def test_a_flood_of_one_address_does_not_shut_out_others_who_have_never_signed_in(stage: Stage) -> None:
    async with asking(stage.relay, "198.51.100.1") as stranger, asking(stage.relay, "203.0.113.7") as home:
        link = stage.link()
        said = [(await stranger.get("/sign-in")).status_code for _ in range(500)]
        assert said[-1] == 429
        ada = Browser(home, PUBLIC_URL)
        assert (await ada.accept_invitation(link)).status_code == 200


async def test_the_limit_of_an_address_tells_nothing_of_who_exists(stage: Stage) -> None:
    ada = await stage.person()
    counts = []
    for number, forge in enumerate((_another_key, _unknown)):
        forge(ada.authenticator)
        async with asking(stage.relay, f"198.51.100.{number}") as stranger:
            ada.http = stranger
            counts.append(await status_after(ada.sign_in, 100))
    assert counts[0] == counts[1]
    assert counts[0][1] == 429


@pytest.mark.parametrize(
    ("path", "media"),
    [
        ("/token", "application/x-www-form-urlencoded"),
        ("/revoke", "application/x-www-form-urlencoded"),
        ("/register", "application/json"),
        ("/authorize", "application/x-www-form-urlencoded"),
        ("/sign-in/passkey", "application/json"),
        ("/invitation/passkey", "application/json"),
    ],
)
async def test_a_body_that_comes_slowly_is_waited_for_ten_seconds_in_all(
    stage: Stage, path: str, media: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.link()
    clock, asked = LoopSeconds(monkeypatch), asyncio.Queue[None]()
    pieces = asyncio.Queue[bytes]()

    async def body() -> AsyncIterator[bytes]:
        while True:
            asked.put_nowait(None)
            yield await pieces.get()

    headers = {"content-type": media, "origin": PUBLIC_URL}
    posted = asyncio.create_task(post_slowly(stage, path, headers, body()))
    for _ in range(9):  # a byte a second keeps nothing open
        await asked.get()
        await clock.pass_by(1.0)
        assert not posted.done()
        pieces.put_nowait(b"x")
    await asked.get()
    await clock.pass_by(BODY_TIMEOUT_S - 9.0)
    assert await posted == 408


async def post_slowly(stage: Stage, path: str, headers: Mapping[str, str], body: AsyncIterator[bytes]) -> int:
    """Return the status of a request whose body comes as ``body`` does."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", PUBLIC_URL.removeprefix("https://").encode())]
        + [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("203.0.113.7", 1),
    }
    sent = list[MutableMapping[str, Any]]()

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": await anext(body), "more_body": True}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await stage.relay.application(scope, receive, send)
    return int(sent[0]["status"])
