"""Each snippet of docs/agent-runtimes.md, run as it is, in frameworks that others wrote."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from schemas.files import PRIVATE, write_atomic
from schemas.projection import alias_of
from tests.fakes.mcp_server import FakeMcpServer
from tests.fakes.signed_tools import relay_with
from tests.fakes.signer import DAY_MS, SimulatedCa

TEXT = (Path(__file__).parent.parent / "docs" / "agent-runtimes.md").read_text("utf-8")
SNIPPETS = dict(re.findall(r"<!-- snippet: ([\w-]+) -->\n```python\n(.*?)```", TEXT, re.DOTALL))
URL = "https://relay.example/mcp/tools"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMcpServer:
    """A relay's tools by their aliases, and the files that the snippets name."""
    # The snippets judge by the system's clock.
    now_ms = time.time_ns() // 1_000_000
    ca = SimulatedCa(now_ms=now_ms - DAY_MS)
    node = ca.issue(now_ms=now_ms - DAY_MS)
    fake = relay_with(node, issued_at_ms=now_ms)
    for tool in fake.tools:
        if (name := tool["name"]) in fake.results:
            fake.results[alias_of(name)] = fake.results[name]
        tool["name"] = alias_of(name)
    write_atomic(tmp_path / "token", "secret", PRIVATE)
    (tmp_path / "root.pem").write_text(ca.root_pem)
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.fixture
def echo(fake: FakeMcpServer) -> str:
    [name] = (str(tool["name"]) for tool in fake.tools if tool["name"].endswith("-echo-invoke"))
    return name


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


@pytest.mark.integration
async def test_the_plain_snippet_calls_a_tool(fake: FakeMcpServer, echo: str, tmp_path: Path) -> None:
    async with fake.over_http() as url:
        assert await definitions("plain", url)["ping"](echo) == "ping"
    assert fake.heads[0]["authorization"] == "Bearer secret"
    assert names_in(tmp_path) == {"calls.jsonl", "pins.json", "root.pem", "token"}


@pytest.mark.integration
async def test_pydantic_ai_calls_a_tool_and_corrects_itself(fake: FakeMcpServer, echo: str) -> None:
    from tests.fakes.scripted_pydantic_ai import Scripted  # noqa: PLC0415 - its library takes seconds

    scripted = Scripted(echo, [{"message": 5}, {"message": "ping"}])
    async with fake.over_http() as url:
        reply = await definitions("pydantic-ai", url)["answer"](scripted.model, "Does it answer?")
    assert reply == "It answers."
    returned = scripted.returned()
    assert [part.outcome for part in returned] == ["retried", "success"]
    assert "/message violates type" in str(returned[0].content)
    assert "'message': 'ping'" in str(returned[1].content)
    assert fake.sent(echo) == 1


@pytest.mark.integration
async def test_langchain_calls_a_tool_and_is_told_an_error(fake: FakeMcpServer, echo: str) -> None:
    from tests.fakes.scripted_langchain import ScriptedChat  # noqa: PLC0415 - its library takes seconds

    model = ScriptedChat(tool=echo, script=[{"message": "a\nb"}, {"message": "ping"}])
    async with fake.over_http() as url:
        reply = await definitions("langchain-core", url)["answer"](model, "Does it answer?")
    assert reply == "It answers."
    failed, worked = model.returned()
    assert (failed.status, worked.status) == ("error", "success")
    assert str(failed.content).startswith("ToolInvalidArguments: ")
    assert json.loads(str(worked.content))["message"] == "ping"
    assert fake.sent(echo) == 1
