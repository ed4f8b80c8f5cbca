"""Sign-in at an OpenID Connect provider: who may, what ends, and what an attacker must not achieve."""

import json
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
import pytest_asyncio

from relay.auth.openid_provider import MIN_INTERVAL_S, OpenidError, OpenidProvider
from relay.pki.authority import CertificateAuthority
from relay.settings.openid import OpenidConfig, openid_config
from relay.sign_in.fetching import Fetcher
from relay.sign_in.pages import ATTEMPT_MS
from relay.state.people import PeopleError, PersonRole
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.environment import PUBLIC_URL, config, fake_environment
from tests.fakes.openid import CLIENT_ID, FakeProvider, SigningKey, fake_provider
from tests.fakes.person import Browser
from tests.fakes.shipped_kinds import SYSTEM_ECHO
from tests.fakes.signer import NOW_MS
from tests.relay.sign_in.conftest import REDIRECT, Stage, staged
from tests.relay.sign_in.test_documents import Published

pytestmark = pytest.mark.integration

BEGIN, ANSWER = "/sign-in/provider", "/sign-in/provider/answer"
ALLOW = ["groups=operators:operator:*", "groups=people:member:default"]
PRIVATE = replace(SYSTEM_ECHO, name="system.private", short="private", sensitive=True)


@pytest.fixture
def provider() -> Any:
    with fake_provider(FakeClock(NOW_MS)) as provider:
        yield provider


def settings_of(provider: FakeProvider, directory: Path, **more: str) -> OpenidConfig:
    secret = directory / "oidc.secret"
    secret.write_text("a secret\n")
    secret.chmod(0o600)
    table = {"issuer": provider.url, "client_id": CLIENT_ID, "secret_file": str(secret), "allow": ALLOW}
    found = openid_config(json.dumps(table | more))
    assert found is not None
    return found


@asynccontextmanager
async def with_provider(
    directory: Path, registry: SchemaRegistry, provider: FakeProvider, **more: str
) -> AsyncIterator[Stage]:
    """Hold the relay of ``directory``; ``more`` are further settings of the provider."""
    wanted = replace(config(directory), broker=None, oidc=settings_of(provider, directory, **more))
    fake = fake_environment(wanted, registry, KindRegistry([SYSTEM_ECHO, PRIVATE]))
    provider.now_ms = fake.clock
    async with staged(fake, directory) as stage:
        yield stage


@pytest_asyncio.fixture
async def stage(tmp_path: Path, registry: SchemaRegistry, provider: FakeProvider) -> AsyncIterator[Stage]:
    async with with_provider(tmp_path, registry, provider) as stage:
        yield stage


async def begun(browser: Browser, path: str = BEGIN) -> str:
    """Return where a browser is sent to that has followed the link of the sign-in page."""
    sent = await browser.get(path)
    assert sent.status_code == 303, sent.text
    return str(sent.headers["location"])


async def signed_in(stage: Stage, provider: FakeProvider, subject: str = "subject-1") -> Browser:
    browser = Browser(stage.http, PUBLIC_URL)
    answer = await browser.get(f"{ANSWER}?{provider.authorize(await begun(browser), subject)}")
    assert answer.status_code == 303, answer.text
    return browser


async def refusal(stage: Stage, provider: FakeProvider) -> httpx2.Response:
    """Return the page that a person sees who comes back from the provider, and is not signed in."""
    browser = Browser(stage.http, PUBLIC_URL)
    answer = await browser.get(f"{ANSWER}?{provider.authorize(await begun(browser))}")
    assert answer.status_code in {403, 502}, answer.text
    assert "__Host-edge-session" not in browser.cookies
    return answer


async def test_a_person_of_the_provider_gives_a_client_what_its_claims_allow(
    stage: Stage, provider: FakeProvider
) -> None:
    client = await stage.registered()
    browser = Browser(stage.http, PUBLIC_URL)
    page = await browser.get(stage.query(client))
    assert "Sign in with 127.0.0.1" in page.text
    assert "passkey" not in page.text, "no person was invited"
    url = await begun(browser, f"{BEGIN}?{stage.query(client).partition('?')[2]}")
    asked = parse_qs(urlsplit(url).query)
    assert asked["redirect_uri"] == [PUBLIC_URL + ANSWER]
    assert asked["scope"] == ["openid profile email"]
    provider.claims = {"preferred_username": "ada"}
    back = await browser.get(f"{ANSWER}?{provider.authorize(url)}")
    assert back.headers["location"] == stage.query(client)
    assert browser.cookies.keys() == {"__Host-edge-session"}
    tokens = await stage.tokens(browser, client)
    assert await stage.is_accepted(tokens["access_token"])
    [person] = stage.relay.people.read().by_id.values()
    assert (person.name, person.role, person.tenant) == ("ada", PersonRole.MEMBER, "default")
    stage.link("bob")
    assert "Sign in with a passkey" in (await Browser(stage.http, PUBLIC_URL).get("/sign-in")).text


@pytest.mark.parametrize(
    "claims",
    [
        {"groups": None},
        {"groups": []},
        {"groups": "others"},
        {"groups": {"people": True}},
        {"groups": [["people"]]},
        {"groups": "peoples"},
        {"groups": True},
    ],
    ids=str,
)
async def test_claims_that_name_nothing_give_no_sign_in(
    stage: Stage, provider: FakeProvider, claims: dict[str, Any]
) -> None:
    provider.claims = claims
    assert "its groups do not let you" in (await refusal(stage, provider)).text
    assert stage.relay.people.read().by_id == {}


async def test_what_changes_at_the_provider_holds_from_the_next_sign_in_on(
    stage: Stage, provider: FakeProvider
) -> None:
    client = await stage.registered()
    provider.claims = {"groups": ["people", "operators"]}
    ada = await signed_in(stage, provider)
    form = {"choice": "chosen", "scope": "tools:call:reversible", "kind": "system.echo", "tenant": "default"}
    person = next(iter(stage.relay.people.read().by_id.values()))
    assert (person.role, person.tenant) == (PersonRole.OPERATOR, "*")
    provider.claims = {"groups": ["people"]}
    member = await signed_in(stage, provider)
    looks = await stage.tokens(member, client)
    assert "choose from what the page shows" in (await ada.allow(stage.query(client), **form)).text
    assert len(stage.relay.people.read().by_id) == 1
    provider.claims = {"groups": ["others"]}
    await refusal(stage, provider)
    stage.applied()
    assert not await stage.is_accepted(looks["access_token"])
    assert (await stage.refresh(looks["refresh_token"], client)).status_code == 400
    assert "Signed in as" not in (await ada.get("/sign-in")).text
    assert (
        next(iter(stage.relay.people.read().by_id.values())).state(stage.fake.clock(), provider.url)
        == "ended"
    )
    provider.claims = {}
    again = await signed_in(stage, provider)
    assert "Signed in as" in (await again.get("/sign-in")).text
    assert "Signed in as" not in (await member.get("/sign-in")).text  # it was not asked while that had ended


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"choice": "look_without_logs", "tenant": "default"}, 200),
        ({"choice": "chosen", "scope": "tools:call:read_only", "kind": SYSTEM_ECHO.name}, 200),
        ({"choice": "chosen", "scope": "tools:call:reversible", "kind": SYSTEM_ECHO.name}, 400),
        ({"choice": "chosen", "scope": "tools:call:read_only", "kind": PRIVATE.name}, 400),
        ({"choice": "look"}, 400),
        ({"choice": "look_without_logs", "tenant": "another"}, 400),
    ],
    ids=str,
)
async def test_with_a_smaller_role_ends_what_it_could_not_give(
    stage: Stage, provider: FakeProvider, form: dict[str, Any], status: int
) -> None:
    for tenant in ("default", "another"):
        CertificateAuthority(stage.state / "ca", stage.fake.clock, os.urandom).issue_mock(
            1, stage.state / tenant, tenant
        )
    client = await stage.registered()
    provider.claims = {"groups": ["operators"]}
    operator = await signed_in(stage, provider)
    form = {"tenant": "default"} | form
    tokens = await stage.tokens(operator, client, **form)
    code = await stage.code(operator, client, **form)
    provider.claims = {"groups": ["people"]}
    await signed_in(stage, provider)
    stage.applied()
    assert await stage.is_accepted(tokens["access_token"]) is (status == 200)
    assert (await stage.refresh(tokens["refresh_token"], client)).status_code == status
    assert (await stage.token(code=code, client_id=client)).status_code == status


async def test_what_is_given_lasts_no_longer_than_the_operator_lets_people_of_the_provider(
    tmp_path: Path, registry: SchemaRegistry, provider: FakeProvider
) -> None:
    async with with_provider(tmp_path, registry, provider) as stage:
        client = await stage.registered()
        tokens = await stage.tokens(await signed_in(stage, provider), client, lifetime="quarter")
    async with with_provider(tmp_path, registry, provider, max_lifetime="7d") as stage:
        ada, bob = await signed_in(stage, provider), await stage.person("bob")
        page = (await ada.get(stage.query(client))).text
        assert re.findall(r'<option value="(\w+)"( selected)?>', page) == [
            ("hour", ""),
            ("day", ""),
            ("longest", " selected"),
        ]
        assert "Choose until when." in (await ada.allow(stage.query(client), lifetime="month")).text
        given = await stage.tokens(ada, client, lifetime="longest")
        by_passkey = await stage.tokens(bob, client, lifetime="quarter")
        stage.fake.clock.now_ms += 7 * 86_400_000 - 1
        before = [await stage.refresh(each["refresh_token"], client) for each in (tokens, by_passkey)]
        stage.fake.clock.now_ms += 1
        for members, status in ((before[0].json(), 400), (before[1].json(), 200), (given, 400)):
            assert (await stage.refresh(members["refresh_token"], client)).status_code == status


async def test_what_need_not_be_asked_again_is_asked_again_once_it_has_ended(
    tmp_path: Path, registry: SchemaRegistry, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = "https://client.example/client.json"
    document = {"client_id": client, "client_name": "X", "redirect_uris": [REDIRECT]}
    published = Published({client: document})
    monkeypatch.setattr(Fetcher, "fetch", lambda _, url: published.fetch(url))
    async with with_provider(tmp_path, registry, provider) as stage:
        ada = await signed_in(stage, provider)
        await stage.tokens(ada, client, lifetime="quarter", remember="yes")
        assert (await ada.get(stage.query(client))).status_code == 303
    async with with_provider(tmp_path, registry, provider, max_lifetime="1d") as stage:
        assert (await (await signed_in(stage, provider)).get(stage.query(client))).status_code == 303
        stage.fake.clock.now_ms += 86_400_000
        assert (await (await signed_in(stage, provider)).get(stage.query(client))).status_code == 200


async def test_who_is_revoked_here_stays_so_whatever_the_provider_says(
    stage: Stage, provider: FakeProvider
) -> None:
    provider.claims = {"preferred_username": "ada"}
    ada = await signed_in(stage, provider)
    stage.relay.people.revoke("ada")
    assert "Signed in as" not in (await ada.get("/sign-in")).text
    assert "has revoked you" in (await refusal(stage, provider)).text


async def test_a_name_at_the_provider_is_never_that_of_another(stage: Stage, provider: FakeProvider) -> None:
    await stage.person("ada")
    provider.claims = {"preferred_username": "ada"}
    mallory = await signed_in(stage, provider, "mallory")
    names = [person.name for person in stage.relay.people.read().by_id.values()]
    assert names[0] == "ada"
    assert names[1].startswith("ada-")
    assert f"Signed in as {names[1]}" in (await mallory.get("/sign-in")).text
    for subject, called in (("s3", "\x1b[31m<b>"), ("s4", "x" * 500), ("s5", 7)):
        provider.claims = {"preferred_username": called}
        await signed_in(stage, provider, subject)
    names = [person.name for person in stage.relay.people.read().by_id.values()]
    assert names[2:] == ["31m-b-", "x" * 48, "s5"]
    for change in (stage.relay.people.reset, lambda name: stage.link(name, PersonRole.MEMBER)):
        with pytest.raises(PeopleError, match="signs in at the provider"):
            change("s5")


async def test_what_another_provider_has_said_counts_for_nothing(
    stage: Stage, provider: FakeProvider
) -> None:
    client = await stage.registered()
    ada = await signed_in(stage, provider)
    tokens = await stage.tokens(ada, client)
    stage.relay.people.read().issuer = "https://another.example"
    assert "Signed in as" not in (await ada.get("/sign-in")).text
    assert (await stage.refresh(tokens["refresh_token"], client)).status_code == 400


# --- the browser


async def test_an_answer_is_worth_nothing_in_another_browser(stage: Stage, provider: FakeProvider) -> None:
    """Login CSRF, and an attacker's code injected into the victim's browser."""
    mallory, victim = Browser(stage.http, PUBLIC_URL), Browser(stage.http, PUBLIC_URL)
    query = provider.authorize(await begun(mallory), "mallory")
    assert (await victim.get(f"{ANSWER}?{query}")).status_code == 403, "a browser that has begun nothing"
    await begun(victim)
    assert (await victim.get(f"{ANSWER}?{query}")).status_code == 403, "one that has begun its own"
    own = provider.authorize(await begun(victim), "victim")
    stolen = query.partition("&")[0] + "&" + own.partition("&")[2]
    assert (await victim.get(f"{ANSWER}?{stolen}")).status_code == 502, (
        "PKCE: the code is of another's verifier"
    )
    assert "__Host-edge-session" not in victim.cookies


async def test_an_answer_is_good_once_and_for_minutes(stage: Stage, provider: FakeProvider) -> None:
    browser = Browser(stage.http, PUBLIC_URL)
    query = provider.authorize(await begun(browser))
    kept = dict(browser.cookies)
    assert (await browser.get(f"{ANSWER}?{query}")).status_code == 303
    browser.cookies = kept
    assert (await browser.get(f"{ANSWER}?{query}")).status_code == 403
    query = provider.authorize(await begun(browser))
    stage.fake.clock.now_ms += ATTEMPT_MS
    assert (await browser.get(f"{ANSWER}?{query}")).status_code == 403


async def test_no_more_answers_are_redeemed_at_once_than_may_and_a_refused_one_stays_good(
    stage: Stage, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = Browser(stage.http, PUBLIC_URL)
    answer = f"{ANSWER}?{provider.authorize(await begun(browser))}"
    with monkeypatch.context() as none:
        none.setattr("relay.sign_in.provider.MAX_AT_ONCE", 0)
        refused = await browser.get(answer)
        assert refused.status_code == 503
    assert (await browser.get(answer)).status_code == 303


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none"])
async def test_no_other_site_begins_a_sign_in(stage: Stage, provider: FakeProvider, site: str) -> None:
    sent = await stage.http.get(BEGIN, headers={"sec-fetch-site": site})
    assert sent.headers["location"] == "/sign-in"
    assert provider.asked == []


@pytest.mark.parametrize("query", ["//evil.example/", "@evil.example", "/../%2F%2Fevil.example", "%0d%0aa:b"])
async def test_from_the_provider_a_browser_comes_back_to_a_page_of_the_relay_alone(
    stage: Stage, provider: FakeProvider, query: str
) -> None:
    """Open redirect."""
    browser = Browser(stage.http, PUBLIC_URL)
    back = await browser.get(f"{ANSWER}?{provider.authorize(await begun(browser, f'{BEGIN}?{query}'))}")
    assert back.headers["location"] == f"/authorize?{query}"


async def test_a_session_of_before_is_not_gone_on_with(stage: Stage, provider: FakeProvider) -> None:
    """Session fixation."""
    mallory = await signed_in(stage, provider, "mallory")
    victim = Browser(stage.http, PUBLIC_URL)
    victim.cookies = dict(mallory.cookies)
    await victim.get(f"{ANSWER}?{provider.authorize(await begun(victim), 'victim')}")
    assert victim.cookies != mallory.cookies
    assert "Signed in as" not in (await mallory.get("/sign-in")).text


@pytest.mark.parametrize(
    ("metadata", "iss", "status"),
    [
        ({}, "", 303),
        ({}, "&iss=https%3A%2F%2Fevil.example", 502),
        ({"authorization_response_iss_parameter_supported": True}, "", 502),
        ({"authorization_response_iss_parameter_supported": True}, "&iss={0}", 303),
        ({"authorization_response_iss_parameter_supported": True}, "&iss={0}%2F", 502),
        ({}, "&iss={0}&iss={0}", 400),
        ({}, "&code=another", 400),
        ({}, "&state=another", 403),
    ],
)
async def test_a_mix_up_of_providers_fails(
    stage: Stage, provider: FakeProvider, metadata: dict[str, Any], iss: str, status: int
) -> None:
    provider.metadata = metadata
    browser = Browser(stage.http, PUBLIC_URL)
    query = provider.authorize(await begun(browser)) + iss.format(provider.url)
    assert (await browser.get(f"{ANSWER}?{query}")).status_code == status


async def test_an_error_of_the_provider_is_shown_without_its_words(
    stage: Stage, provider: FakeProvider
) -> None:
    browser = Browser(stage.http, PUBLIC_URL)
    state = provider.authorize(await begun(browser)).partition("&")[2]
    page = await browser.get(f"{ANSWER}?error=<script>x&error_description=<script>y&{state}")
    assert page.status_code == 403
    assert "has not signed you in" in page.text
    assert "script>" not in page.text


# --- the ID token


def _of_another_key(provider: FakeProvider) -> None:
    other = SigningKey()
    provider.id_token = other.jwt({"iss": provider.url})


def _unsigned(provider: FakeProvider) -> None:
    provider.header = {"alg": "none"}


def _by_a_public_key_as_a_secret(provider: FakeProvider) -> None:
    provider.header = {"alg": "HS256"}


def _with_its_own_key(provider: FakeProvider) -> None:
    other = SigningKey(kid="another")
    provider.id_token = other.jwt({"iss": provider.url}, jwk=other.jwk, jku=f"{provider.url}/jwks")


def _with_crit(provider: FakeProvider) -> None:
    provider.header = {"crit": ["b64"], "b64": False}


def _of_another_algorithm(provider: FakeProvider) -> None:
    provider.header = {"alg": "RS256"}


def _no_jwt(provider: FakeProvider) -> None:
    provider.id_token = "no.jwt"


def _too_long(provider: FakeProvider) -> None:
    provider.claims = {"filler": "x" * 40_000}


@pytest.mark.parametrize(
    "plant",
    [
        _of_another_key,
        _unsigned,
        _by_a_public_key_as_a_secret,
        _with_its_own_key,
        _with_crit,
        _of_another_algorithm,
        _no_jwt,
        _too_long,
    ],
)
async def test_a_forged_token_signs_nobody_in(
    stage: Stage, provider: FakeProvider, plant: Callable[[FakeProvider], None]
) -> None:
    plant(provider)
    assert (await refusal(stage, provider)).status_code == 502
    assert stage.relay.people.read().by_id == {}


NOW_S = NOW_MS // 1000


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://evil.example"},
        {"iss": None},
        {"aud": "another"},
        {"aud": None},
        {"aud": []},
        {"aud": [CLIENT_ID, "another"]},
        {"aud": [CLIENT_ID, "another"], "azp": "another"},
        {"azp": "another"},
        {"exp": NOW_S - 61},
        {"exp": None},
        {"exp": "soon"},
        {"exp": True},
        {"iat": NOW_S + 120},
        {"iat": NOW_S - 3_600},
        {"iat": None},
        {"nbf": NOW_S + 120},
        {"nonce": "another"},
        {"nonce": None},
        {"nonce": 1},
        {"sub": None},
        {"sub": ""},
        {"sub": 7},
        {"sub": "x" * 256},
        {"sub": "a\nb"},
    ],
    ids=str,
)
async def test_a_token_that_is_not_of_this_sign_in_signs_nobody_in(
    stage: Stage, provider: FakeProvider, claims: dict[str, Any]
) -> None:
    provider.claims = claims
    assert (await refusal(stage, provider)).status_code == 502
    assert stage.relay.people.read().by_id == {}


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
async def test_the_three_algorithms(stage: Stage, provider: FakeProvider, algorithm: str) -> None:
    provider.key = SigningKey(algorithm)
    provider.claims = {"aud": [CLIENT_ID, "another"], "azp": CLIENT_ID}
    await signed_in(stage, provider)


async def test_keys_are_kept_and_fetched_anew_for_one_that_is_not_known(
    stage: Stage, provider: FakeProvider
) -> None:
    await signed_in(stage, provider)
    await signed_in(stage, provider)
    assert provider.asked.count("/jwks") == 1
    provider.key = SigningKey(kid="two")
    await refusal(stage, provider)  # a flood of unknown keys is no flood of fetches
    assert provider.asked.count("/jwks") == 1
    stage.fake.seconds.now += MIN_INTERVAL_S
    await signed_in(stage, provider)
    assert provider.asked.count("/jwks") == 2
    assert provider.asked.count("/.well-known/openid-configuration") == 1


# --- the provider's server

_DISCOVERY = "/.well-known/openid-configuration"


@pytest.mark.parametrize(
    ("path", "answer", "says"),
    [
        (_DISCOVERY, (302, {"location": "https://evil.example/"}, b""), "answers 302"),
        (_DISCOVERY, (200, {}, b"[]"), "without a JSON object"),
        (_DISCOVERY, (200, {}, b'{"a":1,"a":2}'), "without a JSON object"),
        (_DISCOVERY, (200, {}, b" " * 70_000), "answers too much"),
        (_DISCOVERY, (200, {"content-length": "90"}, b"{}"), "is not reached"),
        ("/jwks", (500, {}, b""), "/jwks answers 500"),
        ("/jwks", (200, {}, b'{"keys": 1}'), "has no JWK set"),
        ("/token", (302, {"location": "https://evil.example/"}, b""), "/token answers 302"),
        ("/token", (200, {}, b"{}"), "gives no ID token"),
        ("/token", (200, {}, b" " * 70_000), "answers too much"),
    ],
)
async def test_what_a_provider_answers_is_bounded_and_named_in_the_log(
    stage: Stage, provider: FakeProvider, path: str, answer: tuple[int, dict[str, str], bytes], says: str
) -> None:
    provider.answers[path] = answer
    browser = Browser(stage.http, PUBLIC_URL)
    page = await browser.get(BEGIN)
    if page.status_code == 303:
        page = await browser.get(f"{ANSWER}?{provider.authorize(page.headers['location'])}")
    assert page.status_code == 502
    assert "the operator sees why" in page.text
    assert says in stage.fake.lines.getvalue()


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"issuer": "https://evil.example"}, "of the issuer 'https://evil.example'"),
        ({"issuer": None}, "of the issuer"),
        ({"code_challenge_methods_supported": ["plain"]}, "no PKCE by S256"),
        ({"code_challenge_methods_supported": 1}, "no PKCE by S256"),
        ({"token_endpoint_auth_methods_supported": ["private_key_jwt"]}, "takes no secret"),
        ({"token_endpoint_auth_methods_supported": [{}]}, "takes no secret"),
        ({"token_endpoint": "http://192.0.2.1/token"}, "'http://192.0.2.1/token' for a URL"),
        ({"authorization_endpoint": "javascript:alert(1)"}, "for a URL"),
        ({"authorization_endpoint": "https://id.example/\r\nset-cookie: a"}, "for a URL"),
        ({"jwks_uri": "https://user@id.example/"}, "for a URL"),
        ({"jwks_uri": "https://id.example:x/"}, "for a URL"),
        ({"jwks_uri": None}, "for a URL"),
    ],
    ids=str,
)
async def test_metadata_that_cannot_be_used_are_refused_by_name(
    stage: Stage, provider: FakeProvider, metadata: dict[str, Any], says: str
) -> None:
    provider.metadata = metadata
    assert (await stage.http.get(BEGIN)).status_code == 502
    assert says in stage.fake.lines.getvalue()
    provider.metadata = {}
    assert (await stage.http.get(BEGIN)).status_code == 502, "a flood of sign-ins is no flood of fetches"
    assert len(provider.asked) == 1
    stage.fake.seconds.now += MIN_INTERVAL_S
    assert (await stage.http.get(BEGIN)).status_code == 303


@pytest.mark.parametrize("host", ["127.0.0.2", "169.254.169.254", "10.0.0.1", "[::1]", "[::ffff:10.0.0.1]"])
async def test_a_provider_leads_the_relay_to_no_other_private_host(
    provider: FakeProvider, tmp_path: Path, host: str
) -> None:
    scheme = "http" if host in {"127.0.0.2", "[::1]"} else "https"
    provider.metadata = {"jwks_uri": f"{scheme}://{host}/jwks"}
    with pytest.raises(OpenidError, match="neither the issuer's host nor public"):
        await asked_directly(provider, tmp_path).keys()


async def test_a_name_that_leads_to_a_private_address_is_no_way_around(
    provider: FakeProvider, tmp_path: Path
) -> None:
    async def resolve(_host: str) -> list[str]:
        return ["93.184.215.14", "10.0.0.1"]

    provider.metadata = {"jwks_uri": "https://keys.example/jwks"}
    with pytest.raises(OpenidError, match=r"keys\.example is neither"):
        await asked_directly(provider, tmp_path, resolve=resolve).keys()


async def test_another_host_is_connected_to_at_the_address_that_was_checked(
    provider: FakeProvider, tmp_path: Path
) -> None:
    async def resolve(host: str) -> list[str]:
        assert host == "localhost"
        return ["127.0.0.1"]

    provider.metadata = {"jwks_uri": provider.url.replace("127.0.0.1", "localhost") + "/jwks"}
    [key] = await asked_directly(provider, tmp_path, resolve=resolve, is_allowed="127.0.0.1".__eq__).keys()
    assert key["kid"] == "one"


def asked_directly(provider: FakeProvider, directory: Path, **parts: Any) -> OpenidProvider:
    return OpenidProvider(
        issuer=provider.url,
        client_id=CLIENT_ID,
        secret=settings_of(provider, directory).secret,
        redirect_uri=PUBLIC_URL + ANSWER,
        now_ms=provider.now_ms,
        monotonic=lambda: 1_000.0,
        **parts,
    )


async def test_the_secret_must_be_of_its_owner_alone(
    stage: Stage, provider: FakeProvider, tmp_path: Path
) -> None:
    (tmp_path / "oidc.secret").chmod(0o644)
    assert (await refusal(stage, provider)).status_code == 502
    assert "oidc.secret" in stage.fake.lines.getvalue()
    assert "a secret" not in stage.fake.lines.getvalue()
