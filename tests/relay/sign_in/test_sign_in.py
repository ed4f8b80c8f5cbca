"""From a link to a token that calls are made with; what people and clients get, and what ends it."""

import json
import os

import pytest
from nacl.signing import SigningKey

from relay.auth.agent_tokens import TokenIssuer
from relay.auth.permissions import SCOPES
from relay.pki.authority import CertificateAuthority
from relay.state.key_files import read_key
from relay.state.people import PersonRole
from schemas.files import PRIVATE, write_atomic
from schemas.keys import private_key_to_pem
from schemas.labels import NodeName
from schemas.registry import SchemaRegistry
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.person import Browser, answered, form_value
from tests.fakes.signer import NODE_ID, TENANT
from tests.relay.sign_in.conftest import LOOPBACK, Stage

HOUR_MS = 3_600_000
_ERA = {"protocolVersion": "2026-07-28", "clientCapabilities": {}}


def claims_of(stage: Stage, token: str) -> dict[str, object]:
    principal = stage.relay.authenticator.identify(token)
    return {
        "sub": principal.sub,
        "tenant": principal.tenant,
        "scopes": principal.scopes,
        "kinds": principal.kinds,
        "nodes": principal.nodes,
    }


async def test_nothing_is_there_before_the_first_person(stage: Stage) -> None:
    for path in ("/authorize", "/sign-in", "/.well-known/oauth-authorization-server", "/invitation"):
        assert (await stage.http.get(path)).status_code == 404, path
    assert (await stage.http.post("/register", json={})).status_code == 404
    assert "resource_metadata" not in (await stage.http.post("/mcp")).headers["www-authenticate"]


async def test_a_link_makes_a_passkey_and_a_client_gets_a_token(stage: Stage) -> None:
    ada = await stage.person()
    client_id = await stage.registered()
    tokens = await stage.tokens(ada, client_id)
    assert tokens["token_type"] == "Bearer"
    assert tokens["expires_in"] == 3600
    assert tokens["scope"] == "tools:call:read_only"
    assert None not in tokens.values()
    assert await stage.is_accepted(tokens["access_token"])
    refreshed = (await stage.refresh(tokens["refresh_token"], client_id)).json()
    assert await stage.is_accepted(refreshed["access_token"])
    issued = (stage.state / "issued_tokens.jsonl").read_text("ascii").splitlines()
    assert [json.loads(line)["sub"] for line in issued] == ["ada/A-Client"] * 2


@pytest.mark.parametrize(
    "path",
    [
        "/.well-known/oauth-authorization-server",
        "/.well-known/oauth-authorization-server/mcp/kinds",
        "/.well-known/openid-configuration",
        "/.well-known/openid-configuration/mcp",
        "/mcp/.well-known/openid-configuration",
    ],
)
async def test_the_metadata_is_the_same_at_every_path_and_names_what_is_there(
    stage: Stage, path: str
) -> None:
    stage.link()
    metadata = (await stage.http.get(path)).json()
    assert metadata["issuer"] == PUBLIC_URL
    assert metadata["code_challenge_methods_supported"] == ["S256"]
    assert metadata["authorization_response_iss_parameter_supported"] is True
    assert metadata["client_id_metadata_document_supported"] is True
    assert "none" in metadata["token_endpoint_auth_methods_supported"]
    for name, url in metadata.items():
        if name.endswith("_endpoint"):
            method = "GET" if name == "authorization_endpoint" else "POST"
            answer = await stage.http.request(method, url)
            assert answer.status_code not in {404, 405}, name


@pytest.mark.parametrize("path", ["/mcp", "/mcp/tools", "/mcp/kinds"])
async def test_each_path_of_mcp_names_its_resource_and_its_server(stage: Stage, path: str) -> None:
    stage.link()
    challenge = (await stage.http.post(path)).headers["www-authenticate"]
    url = f"{PUBLIC_URL}/.well-known/oauth-protected-resource{path}"
    assert f'resource_metadata="{url}"' in challenge
    assert 'scope="tools:call:read_only"' in challenge
    resource = (await stage.http.get(url)).json()
    assert resource["resource"] == PUBLIC_URL + path
    assert resource["authorization_servers"] == [PUBLIC_URL]
    assert "offline_access" not in resource["scopes_supported"]


async def test_pasted_tokens_work_beside_sign_in(stage: Stage, registry: SchemaRegistry) -> None:
    stage.link()
    key = read_key(stage.state / "token.key")
    issuer = TokenIssuer(key, PUBLIC_URL, f"{PUBLIC_URL}/mcp", registry)
    now_s = stage.fake.clock() // 1000
    scopes = ["tools:call:read_only"]
    token = issuer.issue(sub="agent", tenant=TENANT, scopes=scopes, now_s=now_s, ttl_s=60, jti="pasted")
    assert await stage.is_accepted(token)


async def test_what_was_chosen_is_what_the_token_says(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    stage.relay.fleet.names.change({NODE_ID: NodeName(TENANT, "pump", ("greenhouse", "site=north"))})
    chosen = {
        "choice": "chosen",
        "scope": ["tools:call:read_only", "tools:call:reversible"],
        "kind": ["system.echo"],
        "board": ["tag:greenhouse"],
        "lifetime": "day",
    }
    token = (await stage.tokens(ada, client_id, **chosen))["access_token"]
    assert claims_of(stage, token) == {
        "sub": "ada/A-Client",
        "tenant": TENANT,
        "scopes": {"tools:call:read_only", "tools:call:reversible"},
        "kinds": ("system.echo",),
        "nodes": ("tag:greenhouse",),
    }
    stage.fake.clock.advance(24 * HOUR_MS)
    assert not await stage.is_accepted(token)


async def test_no_more_is_chosen_than_a_token_has_room_for(stage: Stage) -> None:
    """Beside the longest names that a person, a client and a tenant can have."""
    tenant = "t" * 63
    ada, client_id = await stage.person("a" * 64, tenant=tenant), await stage.registered(name="c" * 80)
    tags = {f"{number:02}{'k' * 30}={'v' * 32}" for number in range(32)}
    names = {f"{NODE_ID[:-2]}{number:02}": NodeName(tenant, "", (tag,)) for number, tag in enumerate(tags)}
    stage.relay.fleet.names.change(names)
    chosen = {"choice": "chosen", "scope": [*SCOPES], "kind": ["system.echo"]}
    page = await ada.allow(stage.query(client_id), **chosen, board=sorted(tags))
    assert (page.status_code, "too long for a token" in page.text) == (400, True)
    tokens = await stage.tokens(ada, client_id, **chosen, board=sorted(tags)[:20])
    assert await stage.is_accepted(tokens["access_token"])


async def test_what_ends_within_the_hour_is_not_refreshed(stage: Stage) -> None:
    tokens = await stage.tokens(await stage.person(), await stage.registered(), lifetime="hour")
    assert "refresh_token" not in tokens


async def test_of_what_acts_nothing_is_preselected(stage: Stage) -> None:
    ada = await stage.person()
    asks = "tools:call:read_only tools:call:physical_actuation"
    page = (await ada.get(stage.query(await stage.registered(), scope=asks))).text
    assert 'value="tools:call:physical_actuation">' in page
    assert 'value="tools:call:read_only" checked>' in page
    assert 'value="look_without_logs" checked>' in page
    assert "move or switch something physical" in page.partition("<form")[0]


async def test_a_refusal_is_sent_to_the_client(stage: Stage) -> None:
    ada = await stage.person()
    answer = answered(await ada.allow(stage.query(await stage.registered()), decision="deny"))
    assert (answer["error"], answer["state"], answer["iss"]) == ("access_denied", "a state", PUBLIC_URL)


async def test_a_person_signs_in_again_and_out(stage: Stage) -> None:
    ada = await stage.person()
    ada.cookies.clear()
    assert "Sign in with a passkey" in (await ada.get("/sign-in")).text
    assert (await ada.sign_in()).json() == {"name": "ada"}
    page = (await ada.get("/sign-in")).text
    assert "Signed in as ada" in page
    assert (await ada.post_form("/sign-out", {"form": form_value(page)})).status_code == 303
    assert ada.cookies == {}
    assert "Sign in with a passkey" in (await ada.get("/sign-in")).text


async def test_another_device_gets_a_link_and_a_lost_one_ends(stage: Stage) -> None:
    ada = await stage.person()
    laptop = Browser(stage.http, PUBLIC_URL)
    assert (await laptop.accept_invitation(stage.link())).status_code == 200
    assert (await ada.sign_in()).status_code == 200
    _, secret = stage.relay.people.reset("ada")
    assert (await ada.sign_in()).status_code == 403
    assert "Sign in with a passkey" in (await laptop.get("/sign-in")).text
    phone = Browser(stage.http, PUBLIC_URL)
    assert (await phone.accept_invitation(f"#{secret}")).status_code == 200


async def test_what_clients_were_given_goes_on_while_a_person_has_no_passkey(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    token = (await stage.tokens(ada, client_id))["refresh_token"]
    code = await stage.code(ada, client_id)
    stage.relay.people.reset("ada")
    refreshed = await stage.refresh(token, client_id)
    assert refreshed.status_code == 200, refreshed.text
    assert (await stage.token(code=code, client_id=client_id)).status_code == 400  # nothing new is given
    stage.relay.people.revoke("ada")
    assert (await stage.refresh(refreshed.json()["refresh_token"], client_id)).status_code == 400


async def test_what_was_allowed_is_listed_and_can_be_ended(stage: Stage) -> None:
    ada = await stage.person()
    client_id = await stage.registered()
    tokens = await stage.tokens(ada, client_id)
    page = (await ada.get("/sign-in")).text
    assert "A Client" in page
    (grant,) = stage.relay.people.ledger.path.parent.joinpath("grants.jsonl").read_text("ascii").splitlines()
    form = {"form": form_value(page), "grant": json.loads(grant)["id"]}
    assert (await ada.post_form("/sign-in/end", form)).status_code == 303
    stage.applied()
    assert not await stage.is_accepted(tokens["access_token"])
    assert (await stage.refresh(tokens["refresh_token"], client_id)).status_code == 400


@pytest.mark.parametrize("which", ["refresh_token", "access_token"])
async def test_a_client_revokes_its_own_token(stage: Stage, which: str) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    tokens = await stage.tokens(ada, client_id)
    form = {"token": tokens[which], "client_id": client_id}
    for _ in range(2):  # of an unknown one nothing is said
        assert (await stage.http.post("/revoke", data=form)).status_code == 200
        stage.applied()
        assert not await stage.is_accepted(tokens["access_token"])
    assert (await stage.refresh(tokens["refresh_token"], client_id)).status_code == 400
    assert stage.ended() == ["ada/A-Client"]


async def test_a_lost_answer_to_a_refresh_is_asked_for_again_for_a_minute(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    first = (await stage.tokens(ada, client_id))["refresh_token"]
    lost = (await stage.refresh(first, client_id)).json()["refresh_token"]
    stage.fake.clock.advance(59_000)
    second = (await stage.refresh(first, client_id)).json()["refresh_token"]
    # Two processes of one client, that have refreshed at once: both go on.
    assert (await stage.refresh(lost, client_id)).status_code == 200
    assert (await stage.refresh(second, client_id)).status_code == 200


async def test_a_client_of_loopback_may_have_any_port(stage: Stage) -> None:
    ada = await stage.person()
    client_id = await stage.registered("http://127.0.0.1/callback", "http://localhost/callback")
    code = await stage.code(ada, client_id, LOOPBACK)
    answer = await stage.token(code=code, client_id=client_id, redirect_uri=LOOPBACK)
    assert answer.status_code == 200


async def test_one_registration_may_name_places_that_are_not_accepted(stage: Stage) -> None:
    stage.link()
    uris = [
        "cursor://anysphere.cursor-mcp/oauth/callback",
        "http://localhost:8787/callback",
        "javascript:alert(1)",
    ]
    body = {"client_name": "Cursor", "redirect_uris": [*uris, "http://elsewhere.example/cb"]}
    answer = await stage.http.post(
        "/register", json=body | {"token_endpoint_auth_method": "client_secret_post"}
    )
    assert answer.status_code == 201
    assert answer.json()["redirect_uris"] == uris[:2]
    assert answer.json()["token_endpoint_auth_method"] == "none"
    assert None not in answer.json().values()


async def test_a_token_is_signed_with_the_key_of_its_time(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    new = SigningKey.generate()
    stage.relay.token_keys.add(bytes(new.verify_key), stage.fake.clock() + HOUR_MS)
    stage.relay.accepted_keys.accept(stage.relay.token_keys.accepted())
    write_atomic(stage.state / "token.key", private_key_to_pem(new), PRIVATE)
    assert await stage.is_accepted((await stage.tokens(ada, client_id))["access_token"])


async def test_it_can_be_forbidden(stage: Stage) -> None:
    object.__setattr__(stage.fake.environment.config, "sign_in", False)
    stage.link()
    assert (await stage.http.get("/authorize")).status_code == 404


async def test_what_people_do_is_in_the_audit_without_a_secret(stage: Stage) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    code = await stage.code(ada, client_id)
    tokens = (await stage.token(code=code, client_id=client_id)).json()
    text = (stage.state / "audit.jsonl").read_text("ascii") + str(stage.fake.lines.entries())
    assert all(event in text for event in ("passkey_made", "signed_in", "client_allowed"))
    secrets = (code, tokens["access_token"], tokens["refresh_token"], *ada.cookies.values())
    assert not any(secret in text for secret in secrets)
    assert all(tokens["refresh_token"] not in file.read_text("utf-8") for file in stage.state.glob("*.jsonl"))


async def test_a_member_of_one_tenant_and_an_operator_of_all(stage: Stage) -> None:
    bob = await stage.person("bob", PersonRole.MEMBER)
    page = (await bob.get(stage.query(await stage.registered()))).text
    assert "tools:call:reversible" not in page
    carol = await stage.person("carol", PersonRole.OPERATOR, "*")
    authority = CertificateAuthority(stage.state / "ca", stage.fake.clock, os.urandom)
    for says in ("No board has enrolled yet", "", "Choose the tenant."):
        answer = await carol.allow(stage.query(await stage.registered()))
        assert answer.status_code == (400 if says else 303)
        assert says in answer.text
        tenant = "another" if says == "" else "default"
        authority.issue_mock(1, stage.state / tenant, tenant)


async def test_a_token_that_is_not_enough_gets_a_result_with_the_challenge_that_chatgpt_reads(
    stage: Stage,
) -> None:
    ada, client_id = await stage.person(), await stage.registered()
    token = (await stage.tokens(ada, client_id))["access_token"]
    meta = {f"io.modelcontextprotocol/{name}": value for name, value in _ERA.items()}
    call = {"name": "session_message", "arguments": {}, "_meta": meta}
    headers = {
        "authorization": f"Bearer {token}",
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": "2026-07-28",
        "mcp-method": "tools/call",
        "mcp-name": "session_message",
    }
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
    async with stage.relay.mcp_endpoint.running():
        answer = await stage.http.post("/mcp/kinds", json=message, headers=headers)
    assert answer.status_code == 200, answer.text
    text = answer.text.partition("data: ")[2] or answer.text
    result = json.loads(text)["result"]
    assert result["isError"] is True
    (challenge,) = result["_meta"]["mcp/www_authenticate"]
    assert 'error="insufficient_scope"' in challenge
    assert f'resource_metadata="{PUBLIC_URL}/.well-known/oauth-protected-resource/mcp/kinds"' in challenge
