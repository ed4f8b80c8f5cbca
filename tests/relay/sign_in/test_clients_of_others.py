"""What clients send that need their maker's account: reconstructed from what they, and their users, publish.

Each begins at the 401 and ends with a token. Their documents are published by a fetcher of the test; the
clients that run on this machine are in tests/conformance.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from relay.sign_in.assertions import ASSERTION_TYPE
from relay.sign_in.fetching import Fetcher
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.person import answered
from tests.relay.sign_in.conftest import Stage
from tests.relay.sign_in.test_documents import KEYS, Published, signed

CLAUDE = "https://claude.ai/oauth/mcp-oauth-client-metadata"
CHATGPT = "https://chatgpt.com/oauth/g-123/client.json"
VSCODE = "https://vscode.dev/oauth/client-metadata.json"
APP = "https://app.example/client.json"
COPILOT = "https://github.com/copilot/cli/client-metadata.json"
DOCUMENTS: Mapping[str, Mapping[str, Any]] = {
    CLAUDE: {
        "client_id": CLAUDE,
        "client_name": "Claude",
        "redirect_uris": [
            "https://claude.ai/api/mcp/auth_callback",
            "https://claude.com/api/mcp/auth_callback",
        ],
        "token_endpoint_auth_method": "none",
    },
    CHATGPT: {
        "client_id": CHATGPT,
        "client_name": "ChatGPT",
        "redirect_uris": ["https://chatgpt.com/connector/oauth/g-123"],
        "token_endpoint_auth_method": "private_key_jwt",
        "token_endpoint_auth_methods_supported": ["private_key_jwt", "none"],
        "jwks_uri": "https://chatgpt.com/oauth/jwks.json",
    },
    "https://chatgpt.com/oauth/jwks.json": {"keys": list(KEYS)},
    VSCODE: {
        "client_id": VSCODE,
        "client_name": "Visual Studio Code",
        "redirect_uris": ["http://127.0.0.1:33418/", "http://127.0.0.1/", "https://vscode.dev/redirect"],
    },
    APP: {"client_id": APP, "client_name": "An app", "redirect_uris": ["com.example.app:/callback"]},
}


@dataclass(frozen=True)
class Sends:
    """What a client sends: its document or registration, where its answer goes, and what it names."""

    client_id: str = ""
    registers: tuple[str, ...] = ()
    redirect: str = ""
    resource: str = f"{PUBLIC_URL}/mcp/kinds"
    scope: str | None = "tools:call:read_only"


CLIENTS = {
    "claude.ai": Sends(CLAUDE, redirect="https://claude.ai/api/mcp/auth_callback"),
    "ChatGPT without its key": Sends(CHATGPT, redirect="https://chatgpt.com/connector/oauth/g-123"),
    "VS Code, its port taken": Sends(VSCODE, redirect="http://127.0.0.1:51234/"),
    "VS Code on the web": Sends(VSCODE, redirect="https://vscode.dev/redirect"),
    "Cursor": Sends(
        registers=(
            "https://www.cursor.com/agents/mcp/oauth/callback",
            "http://localhost:8787/callback",
            "cursor://anysphere.cursor-mcp/oauth/callback",
        ),
        redirect="cursor://anysphere.cursor-mcp/oauth/callback",
        scope="tools:call:read_only tools:call:reversible tools:call:physical_actuation sessions:message",
    ),
    "Copilot CLI, on another port than it registered": Sends(
        registers=("http://127.0.0.1:40001/oauth_callback",), redirect="http://127.0.0.1:40002/oauth_callback"
    ),
    "Copilot CLI by its document": Sends(COPILOT, redirect="http://127.0.0.1:40002/oauth_callback"),
    "Zed": Sends("https://zed.dev/oauth/client-metadata.json", redirect="http://127.0.0.1:4001/callback"),
    "Goose": Sends(
        "https://goose-docs.ai/oauth/client-metadata.json", redirect="http://[::1]:4001/oauth_callback"
    ),
    "one that names the origin": Sends(
        registers=("http://localhost/cb",), redirect="http://localhost:1/cb", resource=f"{PUBLIC_URL}/"
    ),
    "one without scopes": Sends(
        registers=("https://a.example/cb",), redirect="https://a.example/cb", scope=None
    ),
}


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> Published:
    fetcher = Published(DOCUMENTS)
    monkeypatch.setattr(Fetcher, "fetch", lambda _self, url: fetcher.fetch(url))
    return fetcher


async def discovered(stage: Stage) -> dict[str, Any]:
    """Return the metadata that a client finds from the URL that its user pasted."""
    challenge = (await stage.http.post("/mcp/kinds")).headers["www-authenticate"]
    found = re.search(r'resource_metadata="([^"]+)"', challenge)
    assert found is not None
    resource = (await stage.http.get(found[1])).json()
    assert resource["resource"] == f"{PUBLIC_URL}/mcp/kinds"
    (server,) = resource["authorization_servers"]
    metadata: dict[str, Any] = (
        await stage.http.get(f"{server}/.well-known/oauth-authorization-server")
    ).json()
    assert metadata["issuer"] == server
    return metadata


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS.keys())
async def test_from_the_401_to_a_token(stage: Stage, client: Sends) -> None:
    ada = await stage.person()
    metadata = await discovered(stage)
    client_id = client.client_id
    if client.registers:
        body = {
            "client_name": "It",
            "redirect_uris": list(client.registers),
            "grant_types": ["authorization_code", "refresh_token"],
            "response_types": ["code"],
            "token_endpoint_auth_method": "none",
        }
        registered = await stage.http.post(metadata["registration_endpoint"], json=body)
        assert registered.status_code == 201
        client_id = registered.json()["client_id"]
    query = stage.query(client_id, client.redirect, resource=client.resource, scope=client.scope)
    allowed = await ada.allow(query)
    assert allowed.headers["location"].startswith(client.redirect)
    answer = answered(allowed)
    assert answer["iss"] == metadata["issuer"]
    tokens = await stage.token(
        code=answer["code"], client_id=client_id, redirect_uri=client.redirect, resource=client.resource
    )
    assert tokens.status_code == 200, tokens.text
    assert await stage.is_accepted(tokens.json()["access_token"])


def assertion(stage: Stage, jti: str, **claims: object) -> dict[str, str]:
    """Return what ChatGPT proves itself with."""
    now_s = stage.fake.clock() // 1000
    made = {
        "iss": CHATGPT,
        "sub": CHATGPT,
        "aud": f"{PUBLIC_URL}/token",
        "iat": now_s,
        "exp": now_s + 60,
        "jti": jti,
    }
    return {"client_assertion_type": ASSERTION_TYPE, "client_assertion": signed(made | claims, "RS256")}


async def test_chatgpt_proves_itself_by_its_key_and_then_has_to(stage: Stage) -> None:
    ada = await stage.person()
    redirect = "https://chatgpt.com/connector/oauth/g-123"
    code = answered(await ada.allow(stage.query(CHATGPT, redirect)))["code"]
    form = {"redirect_uri": redirect, "client_id": CHATGPT}
    tokens = await stage.token(code=code, **form, **assertion(stage, "1"))
    assert tokens.status_code == 200, tokens.text
    refresh = {"grant_type": "refresh_token", "refresh_token": tokens.json()["refresh_token"]}
    bare = await stage.http.post("/token", data=refresh | {"client_id": CHATGPT})
    assert bare.json()["error"] == "invalid_grant"  # a copied refresh token alone is worth nothing
    for wrong in (assertion(stage, "1"), assertion(stage, "2", aud="https://another-hub.example/token")):
        refused = await stage.http.post("/token", data=refresh | wrong)
        assert (refused.status_code, refused.json()["error"]) == (401, "invalid_client")
    # Without client_id: the assertion says whose it is.
    assert (await stage.http.post("/token", data=refresh | assertion(stage, "3"))).status_code == 200
    assert (await stage.token(code="x", client_id=CLAUDE, **assertion(stage, "4"))).status_code == 401


async def test_who_has_agreed_once_is_not_asked_again_by_the_same_client_at_the_same_place(
    stage: Stage,
) -> None:
    ada = await stage.person()
    first, second = DOCUMENTS[CLAUDE]["redirect_uris"]
    code = answered(await ada.allow(stage.query(CLAUDE, first), remember="yes"))["code"]
    tokens = (await stage.token(code=code, client_id=CLAUDE, redirect_uri=first)).json()
    again = answered(await ada.get(stage.query(CLAUDE, first)))
    assert (await stage.token(code=again["code"], client_id=CLAUDE, redirect_uri=first)).status_code == 200
    asks = 'name="decision"'
    assert asks in (await ada.get(stage.query(CLAUDE, second))).text
    assert asks in (await ada.get(stage.query(CLAUDE, first, scope="tools:call:reversible"))).text
    assert asks in (await (await stage.person("bob")).get(stage.query(CLAUDE, first))).text
    stage.relay.people.reset("ada")
    await ada.accept_invitation(stage.link())
    assert tokens["access_token"]


async def test_the_page_shows_the_host_that_is_proven_and_where_the_answer_goes(stage: Stage) -> None:
    ada = await stage.person()
    page = (await ada.get(stage.query(CLAUDE, "https://claude.ai/api/mcp/auth_callback"))).text
    assert "claude.ai, whose document describes it" in page
    assert "<dd>claude.ai</dd>" in page
    assert "cannot prove which one it is" not in page
    page = (await ada.get(stage.query(VSCODE, "http://127.0.0.1:51234/"))).text
    assert "cannot prove which one it is" in page


async def test_not_to_be_asked_again_is_offered_where_that_holds(stage: Stage) -> None:
    ada, offered = await stage.person(), 'name="remember"'
    assert offered in (await ada.get(stage.query(CLAUDE, "https://claude.ai/api/mcp/auth_callback"))).text
    for client, redirect in ((APP, "com.example.app:/callback"), (VSCODE, "http://127.0.0.1:51234/")):
        page = (await ada.get(stage.query(client, redirect))).text
        assert 'name="decision"' in page
        assert offered not in page


async def test_a_stranger_makes_the_relay_fetch_nothing(stage: Stage, published: Published) -> None:
    ada = await stage.person()
    page = await stage.http.get(stage.query(CHATGPT, "https://chatgpt.com/connector/oauth/g-123"))
    assert "<strong>chatgpt.com</strong> asks" in page.text
    refused = await stage.token(code="x", client_id=CHATGPT, **assertion(stage, "1"))
    assert refused.json()["error"] == "invalid_client"
    form = {"form": "x" * 22, "decision": "allow"}
    assert (await ada.post_form(stage.query(CHATGPT), form)).status_code == 403
    assert published.asked == []
