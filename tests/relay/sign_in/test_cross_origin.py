"""Browser-based clients: pages of this computer sign in and use MCP, and nothing of a person's session.

What browsers let a page do is tried in a real one, at a port of the relay's own host: cookies know no ports.
"""

import json

import pytest

from relay.sign_in.metadata import CLIENT_PATHS
from schemas.addresses import MCP_PATHS
from tests.fakes.chromium import CHROMIUM, chromium
from tests.fakes.person import Browser
from tests.fakes.small_fleet import SmallFleet
from tests.relay.sign_in.conftest import Stage

INSPECTOR = "http://localhost:6274"
RESOURCE_METADATA = "/.well-known/oauth-protected-resource"
SHARED = sorted({*CLIENT_PATHS, *MCP_PATHS, RESOURCE_METADATA, f"{RESOURCE_METADATA}/mcp/kinds"})
OF_PEOPLE = ["/", "/sign-in", "/sign-in/end", "/sign-in/options", "/sign-out", "/authorize", "/invitation"]
ELSEWHERE = [
    "https://evil.example",
    "null",
    "",
    "http://localhost.evil.example",
    "http://evil-localhost:6274",
    "http://evil.localhost:6274",
    "http://127.0.0.1.evil.example",
    "http://127.0.0.1:6274@evil.example",
    "http://127.0.0.1:6274/",
    "http://127.0.0.1:6274 http://evil.example",
    "http://127.0.0.2:6274",
    "http://2130706433:6274",
    "http://[::ffff:127.0.0.1]:6274",
    "http://localhost:627400",
    "http://localhost:",
    "file://localhost",
    "chrome-extension://localhost",
]
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


@pytest.mark.parametrize("path", SHARED)
async def test_a_page_of_this_computer_may_read_what_clients_need(stage: Stage, path: str) -> None:
    await stage.person()
    for origin in (INSPECTOR, "http://127.0.0.1:1", "http://[::1]:65535", "https://localhost"):
        asked = await stage.http.options(path, headers={"origin": origin, **PREFLIGHT})
        assert asked.status_code == 204
        assert "authorization" in asked.headers["access-control-allow-headers"]
        answer = await stage.http.post(path, headers={"origin": origin})
        for each in (asked, answer):
            assert each.headers["access-control-allow-origin"] == origin
            assert "origin" in each.headers["vary"]
            assert "access-control-allow-credentials" not in each.headers
        assert {"www-authenticate", "mcp-session-id"} <= {
            *answer.headers["access-control-expose-headers"].split(", ")
        }


@pytest.mark.parametrize("origin", ELSEWHERE)
async def test_no_other_page_may(stage: Stage, origin: str) -> None:
    ada = await stage.person()
    for path in SHARED:
        for method, more in (("OPTIONS", PREFLIGHT), ("POST", {}), ("GET", {})):
            headers = {"origin": origin, "cookie": cookie_of(ada), **more}
            answer = await stage.http.request(method, path, headers=headers)
            assert (answer.status_code, answer.json()["error"]) == (403, "origin")
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", OF_PEOPLE)
async def test_pages_of_people_are_for_no_other_page_not_even_of_this_computer(
    stage: Stage, path: str
) -> None:
    ada = await stage.person()
    for origin in (INSPECTOR, "https://evil.example"):
        for method, more in (("OPTIONS", PREFLIGHT), ("POST", {}), ("GET", {})):
            headers = {"origin": origin, "cookie": cookie_of(ada), **more}
            answer = await stage.http.request(method, path, headers=headers)
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers


async def test_a_cookie_is_worth_nothing_where_pages_may_read(stage: Stage) -> None:
    ada = await stage.person()
    headers = {"origin": INSPECTOR, "cookie": cookie_of(ada)}
    for path in MCP_PATHS:
        assert (await stage.http.post(path, headers=headers)).status_code == 401
    form = {"grant_type": "refresh_token", "refresh_token": "none", "client_id": await stage.registered()}
    assert (await stage.http.post("/token", data=form, headers=headers)).json()["error"] == "invalid_grant"


async def test_before_the_first_person_no_page_may_read_anything(stage: Stage) -> None:
    for path in SHARED:
        answer = await stage.http.options(path, headers={"origin": INSPECTOR, **PREFLIGHT})
        assert answer.status_code == 403


def cookie_of(browser: Browser) -> str:
    return "; ".join(f"{name}={value}" for name, value in browser.cookies.items())


# --- what a real browser makes of it

CLIENT = """async ({resource, callback}) => {
  const challenge = (await fetch(resource, {method: "POST"})).headers.get("www-authenticate");
  const metadata = await (await fetch(challenge.match(/resource_metadata="([^"]+)"/)[1])).json();
  const issuer = metadata.authorization_servers[0];
  const server = await (await fetch(issuer + "/.well-known/oauth-authorization-server")).json();
  const client = await (await fetch(server.registration_endpoint, {
    method: "POST", headers: {"content-type": "application/json"},
    body: JSON.stringify({client_name: "A page", redirect_uris: [callback]})})).json();
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode("v".repeat(43)));
  const code_challenge = btoa(String.fromCharCode(...new Uint8Array(digest)))
    .replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  const query = new URLSearchParams({
    response_type: "code", client_id: client.client_id, redirect_uri: callback, state: "s",
    code_challenge, code_challenge_method: "S256", resource});
  const page = server.authorization_endpoint + "?" + query;
  return {client: client.client_id, token: server.token_endpoint, page};
}"""
CALLS = """async ({token, client, resource, callback}) => {
  const code = new URLSearchParams(location.search).get("code");
  const tokens = await (await fetch(token, {method: "POST", body: new URLSearchParams({
    grant_type: "authorization_code", client_id: client, redirect_uri: callback, code,
    code_verifier: "v".repeat(43), resource})})).json();
  const headers = {
    "content-type": "application/json", accept: "application/json, text/event-stream",
    authorization: "Bearer " + tokens.access_token, "mcp-protocol-version": "2025-11-25"};
  const send = (message) => fetch(resource, {
    method: "POST", headers, body: JSON.stringify({jsonrpc: "2.0", ...message})});
  const clientInfo = {name: "A page", version: "1"};
  const hello = await send({
    id: 1, method: "initialize", params: {protocolVersion: "2025-11-25", capabilities: {}, clientInfo}});
  headers["mcp-session-id"] = hello.headers.get("mcp-session-id");
  await send({method: "notifications/initialized"});
  const answer = await send({id: 2, method: "tools/call", params: {name: "find_nodes", arguments: {}}});
  const text = await answer.text();  // before its session ends
  const ended = await fetch(resource, {method: "DELETE", headers});
  return {text, session: headers["mcp-session-id"], ended: ended.status};
}"""
ATTACK = """async ({url, grant}) => {
  const tried = async (path, options) => {
    try { return await (await fetch(url + path, {credentials: "include", ...options})).text() }
    catch (error) { return error.name }
  };
  const act = (path) => fetch(url + path, {
    method: "POST", mode: "no-cors", credentials: "include", body: new URLSearchParams({form: "x", grant})});
  await act("/sign-in/end");
  await act("/sign-out");
  return [
    await tried("/sign-in"), await tried("/mcp/kinds", {method: "POST"}), await tried("/authorize"),
    await tried("/.well-known/oauth-authorization-server")];
}"""


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
async def test_a_page_signs_in_and_calls_a_tool_and_cannot_use_its_users_session(
    fleet: SmallFleet, own: str
) -> None:
    invite = ("people", "invite", "ada", "--role", "operator", "--public-url", fleet.url)
    link = (await fleet.relay(*invite)).strip()
    await fleet.start_relay("--no-broker")
    facts = {"url": fleet.url, "resource": f"{fleet.url}/mcp/kinds", "callback": f"{own}/callback"}
    async with chromium() as person:
        page = person.page
        await person.accept_invitation(link)
        await page.goto(own)
        found = await page.evaluate(CLIENT, facts)
        await person.allowed(found["page"])
        await page.wait_for_url(f"{own}/callback**")
        called = await page.evaluate(CALLS, facts | found)
        assert '"total":0' in called["text"].replace(" ", "")
        assert called["session"]
        assert called["ended"] == 200

        (grant,) = json.loads(await fleet.relay("people", "show", "ada", "--json"))["grants"]
        assert await page.evaluate(ATTACK, facts | {"grant": grant["id"]}) == ["TypeError"] * 4
        await page.goto(f"{fleet.url}/sign-in")
        await page.get_by_role("heading", name="Signed in as ada").wait_for()
        assert await page.get_by_role("button", name="End this").count() == 1
