"""4. What is wrong gets the error that the contract names, and reaches no node.

Steps: call with bad arguments, and by bad names · call without a token, or with a bad one. What else is
refused is tried on the parts: calls in tests/relay/calls/test_refused_calls.py, foreign names and origins,
and what is put on the broker, in tests/adversary.
"""

from typing import Any

import httpx2
import pytest

from tests.fakes.demo import Demo, error_of

ERAS = pytest.mark.parametrize("era", ["2026-07-28", "legacy"])


async def failed_call(demo: Demo, era: str, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    async with demo.client(era) as client:
        return error_of(await client.call_tool(tool, arguments))


@pytest.mark.holds("RFC-0001/4/envelope", "RFC-0005/6.2/arguments-before-dispatch")
@ERAS
async def test_arguments_that_fail_their_schema_never_reach_the_node(demo: Demo, era: str) -> None:
    error = await failed_call(demo, era, f"sysecho.{demo.real_node}.echo.invoke", {"message": "line\n"})
    assert error["code"] == "E_MANIFEST_INVALID"
    assert error["suggested_fix"]
    # The decision is the last word of the audit: nothing was allowed, so nothing was sent.
    lines = [line for line in demo.audit() if line.get("correlation_id") == error["correlation_id"]]
    assert [line.get("decision") for line in lines] == ["deny"]


@pytest.mark.parametrize(
    ("name", "code", "shown"),
    [
        pytest.param("\x1b[31mred", "E_VERB_UNSUPPORTED", "\\x1b[31mred", id="a name that is none"),
        pytest.param("red\n", "E_MANIFEST_INVALID", "red\\n", id="not even a name: it has two lines"),
    ],
)
async def test_control_characters_in_a_name_reach_no_error_and_no_audit(
    demo: Demo, name: str, code: str, shown: str
) -> None:
    # Only in the old era: the new one repeats the name in a header, and the client refuses such a header.
    error = await failed_call(demo, "legacy", name, {})
    assert error["code"] == code
    assert "red" not in error["message"]
    [line] = [line for line in demo.audit() if line.get("correlation_id") == error["correlation_id"]]
    assert line["tool"] == shown


@pytest.mark.parametrize(
    ("headers", "challenge"),
    [
        pytest.param({}, "Bearer scope=", id="no-token"),
        pytest.param({"Authorization": "Basic eA=="}, "Bearer scope=", id="no-bearer"),
        pytest.param({"Authorization": "Bearer x.y.z"}, 'Bearer error="invalid_token"', id="no-jwt"),
    ],
)
async def test_without_a_token_there_is_no_mcp(demo: Demo, headers: dict[str, str], challenge: str) -> None:
    async with httpx2.AsyncClient() as http:
        answer = await http.post(demo.mcp_url, json={}, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith(challenge)
        assert "tools:call:read_only" in answer.headers["www-authenticate"]
        # There is no authorization server to name; the body says who issues tokens.
        assert answer.json()["code"] == "E_SAFETY_DENIED"
        assert "relay token issue" in answer.json()["suggested_fix"]
        metadata = await http.get(demo.base_url + "/.well-known/oauth-protected-resource/mcp")
        registered = await http.post(demo.base_url + "/register", json={"redirect_uris": []})
    assert metadata.status_code == registered.status_code == 404
    assert metadata.json() == registered.json()
    assert "relay token issue" in registered.json()["error_description"]


@pytest.mark.parametrize(
    ("path", "status"), [("/", 200), ("/mcp", 401), ("/mcp/kinds", 401), ("/authorize", 404)]
)
async def test_a_person_who_opens_the_url_in_a_browser_reads_how_to_connect(
    demo: Demo, path: str, status: int
) -> None:
    async with httpx2.AsyncClient() as http:
        page = await http.get(demo.base_url + path, headers={"accept": "text/html,*/*;q=0.8"})
    assert page.status_code == status
    assert f"{demo.base_url}/mcp/kinds" in page.text
