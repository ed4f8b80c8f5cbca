"""Clients that others wrote, unchanged, against a whole system that runs.

The MCP Inspector's command line; both TypeScript SDKs, which check every result against the tool's output
schema; and a client that speaks an old version by hand. The Python SDK's client, in both eras, is what
tests/end_to_end use.
"""

import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from schemas.registry import SchemaRegistry
from tests.fakes.demo import Demo
from tests.fakes.npm import NpmPrograms

pytestmark = pytest.mark.long

STRICT_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CLIENTS_PREFIX = "mcp__edge__"


@dataclass(frozen=True, slots=True)
class TypeScript:
    """One of the TypeScript clients: which SDK, in which era, and the version that it then speaks."""

    sdk: str
    era: str
    version: str


TYPESCRIPT = pytest.mark.parametrize(
    "typescript",
    [
        pytest.param(TypeScript("sdk", "legacy", "2025-11-25"), id="sdk-1"),
        pytest.param(TypeScript("client", "legacy", "2025-11-25"), id="sdk-2-legacy"),
        pytest.param(TypeScript("client", "2026-07-28", "2026-07-28"), id="sdk-2"),
    ],
)
FORMS = pytest.mark.parametrize(
    ("query", "mark"),
    [("", "."), ("?names=dashed", "-"), ("/tools", "-")],
    ids=["dotted", "dashed", "by-path"],
)
ERAS = pytest.mark.parametrize("era", ["legacy", "modern"])
OLD_VERSIONS = pytest.mark.parametrize("version", ["2025-06-18", "2025-03-26"])


def echo_of(demo: Demo, mark: str = ".") -> str:
    return mark.join(("sysecho", demo.real_node, "echo", "invoke"))


def metrics_of(demo: Demo, mark: str = ".") -> str:
    return mark.join(("sys", demo.real_node, "sysmetrics", "snapshot"))


def all_names(demo: Demo, mark: str) -> set[str]:
    return {name.replace(".", mark) for name in demo.tool_names}


def check_refusal(result: dict[str, Any]) -> None:
    """Check that a failed call arrived as one: the envelope in the text, and nothing to check by a schema."""
    assert result["isError"] is True
    assert "structuredContent" not in result
    [content] = result["content"]
    envelope = json.loads(content["text"])
    assert envelope["code"] == "E_MANIFEST_INVALID"
    assert envelope["suggested_fix"]
    assert result["_meta"]["edge-kubelet/error"] == envelope


# --- the MCP Inspector's command line


def inspect(
    npm: NpmPrograms, demo: Demo, *arguments: str, query: str = "", expect: int = 0
) -> dict[str, Any]:
    header = f"Authorization: Bearer {demo.facts['token']}"
    done = npm.run(
        "mcp-inspector",
        *("--cli", demo.mcp_url + query, "--transport", "http", "--header", header),
        *("--format", "json", *arguments),
    )
    assert done.returncode == expect, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)["result"]
    return result


@ERAS
@FORMS
def test_the_inspector_lists_the_tools_and_finds_no_schema_that_clients_refuse(
    npm: NpmPrograms, demo: Demo, era: str, query: str, mark: str
) -> None:
    # --strict makes the finding of a schema that some client refuses a failure.
    listed = inspect(npm, demo, "--method", "tools/list", "--protocol-era", era, "--strict", query=query)
    assert {tool["name"] for tool in listed["tools"]} == all_names(demo, mark)


@ERAS
@FORMS
def test_the_inspector_calls_echo(npm: NpmPrograms, demo: Demo, era: str, query: str, mark: str) -> None:
    result = inspect(
        npm,
        demo,
        *("--method", "tools/call", "--protocol-era", era, "--tool-name", echo_of(demo, mark)),
        *("--tool-arg", "message=from the inspector"),
        query=query,
    )
    assert result["structuredContent"]["message"] == "from the inspector"
    assert result["structuredContent"]["node_id"] == demo.real_node


@ERAS
def test_the_inspector_shows_a_refused_call_as_the_tool_s_error(
    npm: NpmPrograms, demo: Demo, era: str
) -> None:
    result = inspect(
        npm,
        demo,
        *("--method", "tools/call", "--protocol-era", era, "--tool-name", echo_of(demo)),
        *("--tool-arg", "other=argument"),
        expect=5,  # its status for a result that is an error
    )
    check_refusal(result)


def test_the_inspector_without_a_token_is_refused(npm: NpmPrograms, demo: Demo) -> None:
    done = npm.run(
        "mcp-inspector",
        *("--cli", demo.mcp_url, "--transport", "http", "--method", "tools/list"),
        *("--stored-auth-only", "--format", "json"),
    )
    assert done.returncode != 0
    assert demo.real_node not in done.stdout


# --- the TypeScript SDKs' clients


def with_typescript(  # noqa: PLR0913, PLR0917 - what a test may want to have otherwise
    npm: NpmPrograms,
    demo: Demo,
    typescript: TypeScript,
    calls: list[dict[str, Any]],
    query: str = "",
    program: list[str] | None = None,
) -> dict[str, Any]:
    done = npm.run(
        "call_tools.mjs",
        *(typescript.sdk, demo.mcp_url + query, typescript.era),
        stdin=json.dumps(calls),
        environment={
            "EDGE_TOKEN": demo.facts["token"],
            **({"EDGE_STDIO": json.dumps(program)} if program else {}),
        },
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["version"] == typescript.version
    return answer


@TYPESCRIPT
@FORMS
def test_a_typescript_client_reads_this_machine(
    npm: NpmPrograms, demo: Demo, typescript: TypeScript, query: str, mark: str
) -> None:
    calls = [
        {"name": echo_of(demo, mark), "arguments": {"message": "from TypeScript"}},
        {"name": metrics_of(demo, mark), "arguments": {}},
        # Either form is taken, whichever is listed.
        {"name": echo_of(demo, "." if mark == "-" else "-"), "arguments": {"message": "the other form"}},
    ]
    answer = with_typescript(npm, demo, typescript, calls, query)
    assert {tool["name"] for tool in answer["tools"]} == all_names(demo, mark)
    echo, metrics, other = (outcome["result"] for outcome in answer["outcomes"])
    assert echo["structuredContent"]["message"] == "from TypeScript"
    assert other["structuredContent"]["message"] == "the other form"
    SchemaRegistry().load("system.metrics.sample@1.0.0").check(metrics["structuredContent"])
    assert metrics["structuredContent"]["node_id"] == demo.real_node


@TYPESCRIPT
def test_a_typescript_client_that_starts_a_program_reads_this_machine(
    npm: NpmPrograms, demo: Demo, typescript: TypeScript
) -> None:
    program = [sys.executable, "-P", "-m", "relay", "stdio", "--url", demo.base_url, "--names", "dashed"]
    calls = [{"name": echo_of(demo, "-"), "arguments": {"message": "from a pipe"}}]
    calls.append({"name": echo_of(demo, "-"), "arguments": {}})
    answer = with_typescript(npm, demo, typescript, calls, program=program)
    assert {tool["name"] for tool in answer["tools"]} == all_names(demo, "-")
    echo, refused = (outcome["result"] for outcome in answer["outcomes"])
    assert echo["structuredContent"]["message"] == "from a pipe"
    check_refusal(refused)


@TYPESCRIPT
def test_a_typescript_client_takes_many_tools_of_one_schema_document(
    npm: NpmPrograms, demo: Demo, typescript: TypeScript
) -> None:
    names = sorted(all_names(demo, "."))
    needed = {"invoke": {"message": "x"}, "subscribe": {"interval_ms": 60_000}}
    arguments = [needed.get(name.rpartition(".")[2], {}) for name in names]
    calls = [{"name": name, "arguments": given} for name, given in zip(names, arguments, strict=True)]
    answer = with_typescript(npm, demo, typescript, calls)
    documents = Counter(tool["_meta"]["edge-kubelet/schema-ref"] for tool in answer["tools"])
    assert max(documents.values()) == len(demo.mock_nodes) + 1
    assert [outcome["result"]["isError"] for outcome in answer["outcomes"]] == [False] * len(names)
    # These clients take care themselves. One plain Ajv for all, as others have it, refuses an id that it has
    # seen, a dialect that it does not know, and keywords without a meaning (docs/decisions/0007).
    assert answer["refused"] == []


@TYPESCRIPT
def test_a_typescript_client_gets_a_refused_call_as_the_tool_s_error(
    npm: NpmPrograms, demo: Demo, typescript: TypeScript
) -> None:
    answer = with_typescript(npm, demo, typescript, [{"name": echo_of(demo), "arguments": {}}])
    [outcome] = answer["outcomes"]
    check_refusal(outcome["result"])


@TYPESCRIPT
def test_a_typescript_client_would_notice_a_result_that_does_not_fit(
    npm: NpmPrograms, demo: Demo, typescript: TypeScript
) -> None:
    # The tests above lean on this: that the client does check what it gets.
    spoilt = {"name": echo_of(demo), "arguments": {"message": "x"}, "spoil": True}
    answer = with_typescript(npm, demo, typescript, [spoilt])
    [outcome] = answer["outcomes"]
    assert "output schema" in outcome["thrown"]


# --- an old client, by hand


def said(response: httpx2.Response) -> dict[str, Any]:
    """Return the one message of a response, which may be plain JSON or a stream."""
    assert response.status_code == httpx2.codes.OK, response.text
    text = response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        [text] = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    message: dict[str, Any] = json.loads(text)
    assert message["jsonrpc"] == "2.0"
    return message


@OLD_VERSIONS
def test_a_client_of_an_old_version_is_answered_in_that_version(demo: Demo, version: str) -> None:
    headers = {
        "Authorization": f"Bearer {demo.facts['token']}",
        "Accept": "application/json, text/event-stream",
    }
    url = demo.mcp_url

    def ask(client: httpx2.Client, number: int, method: str, params: dict[str, Any]) -> dict[str, Any]:
        message = said(
            client.post(url, json={"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        )
        assert message["id"] == number
        result: dict[str, Any] = message["result"]
        return result

    with httpx2.Client(headers=headers) as client:
        hello = {
            "protocolVersion": version,
            "capabilities": {},
            "clientInfo": {"name": "old", "version": "1"},
        }
        first = client.post(url, json={"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello})
        result = said(first)["result"]
        assert result["protocolVersion"] == version
        assert "tools" in result["capabilities"]
        client.headers["Mcp-Session-Id"] = first.headers["mcp-session-id"]
        client.headers["MCP-Protocol-Version"] = version
        ready = client.post(url, json={"jsonrpc": "2.0", "method": "notifications/initialized"})
        assert ready.status_code == httpx2.codes.ACCEPTED
        listed = ask(client, 2, "tools/list", {})
        assert {tool["name"] for tool in listed["tools"]} == all_names(demo, ".")
        called = ask(
            client, 3, "tools/call", {"name": echo_of(demo), "arguments": {"message": "from long ago"}}
        )
        assert called["structuredContent"]["message"] == "from long ago"
        # What came with the new era is not sent to a client that does not know it.
        assert not {"resultType", "ttlMs", "cacheScope"} & {*listed, *called}
        check_refusal(ask(client, 4, "tools/call", {"name": echo_of(demo), "arguments": {}}))
        assert client.delete(url).status_code == httpx2.codes.OK


# --- names


async def test_the_dashed_names_fit_the_strictest_client_with_its_prefix(demo: Demo) -> None:
    async with demo.client(query="?names=dashed") as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
    assert {name for name in names if not STRICT_NAME.fullmatch(CLIENTS_PREFIX + name)} == set()
    assert set(names) == all_names(demo, "-")
