"""Each snippet of docs/agent-runtimes.md, run as it is, in frameworks that others wrote."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from schemas.files import PRIVATE, write_atomic
from tests.fakes.guarded import ECHO_OF_ANY as ECHO
from tests.fakes.guarded import echoed, view_with
from tests.fakes.mcp_server import FakeMcpServer
from tests.fakes.signer import DAY_MS, SimulatedCa

TEXT = (Path(__file__).parent.parent / "docs" / "agent-runtimes.md").read_text("utf-8")
SNIPPETS = dict(re.findall(r"<!-- snippet: ([\w-]+) -->\n```python\n(.*?)```", TEXT, re.DOTALL))
URL = "https://relay.example/mcp/kinds"
NODE_ID = "01hzy3v6k7m8n9p0q1r2s3t4v5"
AT_NODE = {"node": NODE_ID}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMcpServer:
    """A relay's kinds view, whose one node has signed, and the files that the snippets name."""
    # The snippets judge by the system's clock.
    now_ms = time.time_ns() // 1_000_000
    ca = SimulatedCa(now_ms=now_ms - DAY_MS)
    node = ca.issue(NODE_ID, now_ms=now_ms - DAY_MS)
    fake = view_with(node, issued_at_ms=now_ms)
    fake.results[ECHO] = echoed(NODE_ID)
    write_atomic(tmp_path / "token", "secret", PRIVATE)
    (tmp_path / "root.pem").write_text(ca.root_pem)
    monkeypatch.chdir(tmp_path)
    return fake


def names_in(directory: Path) -> set[str]:
    return {file.name for file in directory.iterdir()}


def definitions(name: str, url: str) -> dict[str, Any]:
    """Return what the snippet ``name`` defines, for the server at ``url``."""
    source = SNIPPETS[name]
    assert URL in source
    namespace: dict[str, Any] = {}
    exec(compile(source.replace(URL, url), name, "exec"), namespace)  # noqa: S102 - our own document
    return namespace


def test_there_is_a_snippet_for_each_framework() -> None:
    assert set(SNIPPETS) == {"plain", "pydantic-ai", "langchain-core"}


@pytest.mark.holds("SPEC-0004/4/a-hardened-http")
@pytest.mark.integration
async def test_the_plain_snippet_calls_a_tool(fake: FakeMcpServer, tmp_path: Path) -> None:
    async with fake.over_http() as url:
        assert await definitions("plain", url)["ping"](NODE_ID) == "ping"
    assert fake.heads[0]["authorization"] == "Bearer secret"
    assert names_in(tmp_path) == {"calls.jsonl", "pins.json", "pins.json.lock", "root.pem", "token"}


@pytest.mark.integration
async def test_pydantic_ai_calls_a_tool_and_corrects_itself(fake: FakeMcpServer) -> None:
    from tests.fakes.scripted_pydantic_ai import Scripted  # noqa: PLC0415 - its library takes seconds

    scripted = Scripted(ECHO, [{**AT_NODE, "message": 5}, {**AT_NODE, "message": "ping"}])
    async with fake.over_http() as url:
        reply = await definitions("pydantic-ai", url)["answer"](scripted.model, "Does it answer?")
    assert reply == "It answers."
    returned = scripted.returned()
    assert [part.outcome for part in returned] == ["retried", "success"]
    assert "/message violates type" in str(returned[0].content)
    assert "'message': 'ping'" in str(returned[1].content)
    assert fake.sent(ECHO) == 1


@pytest.mark.integration
async def test_langchain_calls_a_tool_and_is_told_an_error(fake: FakeMcpServer) -> None:
    from tests.fakes.scripted_langchain import ScriptedChat  # noqa: PLC0415 - its library takes seconds

    model = ScriptedChat(tool=ECHO, script=[{**AT_NODE, "message": "a\nb"}, {**AT_NODE, "message": "ping"}])
    async with fake.over_http() as url:
        reply = await definitions("langchain-core", url)["answer"](model, "Does it answer?")
    assert reply == "It answers."
    failed, worked = model.returned()
    assert (failed.status, worked.status) == ("error", "success")
    assert str(failed.content).startswith("ToolInvalidArguments: ")
    assert json.loads(str(worked.content))["message"] == "ping"
    assert fake.sent(ECHO) == 1
