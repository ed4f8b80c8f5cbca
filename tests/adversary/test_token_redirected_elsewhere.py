"""Attacker: an MCP server, or one who can answer in its place. Tried: redirects of a call to another origin,
by every status that redirects, so that the agent runtime presents its token or its arguments there.

What must happen: the call fails; the other origin gets no request at all.
"""

import pytest

from relay.remote_tools import BearerToken, HttpServer, ToolProviderFailure, ToolRule
from tests.fakes.guarded import guarded
from tests.fakes.mcp_server import FakeMcpServer, HttpAnswer
from tests.fakes.raw_http_server import Asked, RawServer


async def _answer(_: Asked, __: object) -> None:
    raise AssertionError("a request to another origin")


@pytest.mark.holds("SPEC-0004/3.4/authentication")
@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_the_other_origin_gets_nothing(status: int, idempotent: bool) -> None:  # noqa: FBT001
    fake = FakeMcpServer()
    async with RawServer.running(_answer) as thief, fake.over_http() as url:
        location = {"Location": f"{thief.url}/mcp"}
        server = HttpServer(url, BearerToken("secret"))
        async with guarded(server, rules=(ToolRule("*", idempotent=idempotent),)) as client:
            await client.tools.list_tools()
            fake.next_answer = HttpAnswer(status, headers=location)
            with pytest.raises(ToolProviderFailure):
                await client.tools.execute("echo", {"message": "ping"})
    assert thief.asked == []
    assert [head["authorization"] for head in fake.heads] == ["Bearer secret"]
