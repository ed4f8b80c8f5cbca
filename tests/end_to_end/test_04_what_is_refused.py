"""4. What is wrong gets the error that the contract names, and reaches no node.

Steps: call with bad arguments, bad names, other tenants' nodes · call without a token, or with a bad one ·
put manifests on the broker that no rule lets through.
"""

import asyncio
from typing import Any

import httpx2
import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from schemas import topics
from schemas.addresses import parse_host_port
from tests.fakes.demo import Demo, error_of
from tests.fakes.metrics_client import metrics_client
from tests.fakes.signer import NODE_ID, SimulatedCa

ERAS = pytest.mark.parametrize("era", ["2026-07-28", "legacy"])
ABSENT_NODE = "01hzx9k3m4p7q8r9s0t1v2w3xy"


async def failed_call(demo: Demo, era: str, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    async with demo.client(era) as client:
        return error_of(await client.call_tool(tool, arguments))


@pytest.mark.holds("RFC-0001/4/envelope", "RFC-0005/6.2/arguments-before-dispatch")
@ERAS
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="missing"),
        pytest.param({"message": "x" * 1025}, id="too-long"),
        pytest.param({"message": "caf\u00e9"}, id="not-ascii"),
        pytest.param({"message": "line\n"}, id="newline"),
        pytest.param({"message": 1}, id="not-a-string"),
        pytest.param({"message": "ok", "extra": 1}, id="extra-member"),
    ],
)
async def test_arguments_that_fail_their_schema_never_reach_the_node(
    demo: Demo, era: str, arguments: dict[str, Any]
) -> None:
    tool = f"sysecho.{demo.real_node}.echo.invoke"
    error = await failed_call(demo, era, tool, arguments)
    assert error["code"] == "E_MANIFEST_INVALID"
    assert error["suggested_fix"]
    # The decision is the last word of the audit: nothing was allowed, so nothing was sent.
    lines = [line for line in demo.audit() if line.get("correlation_id") == error["correlation_id"]]
    assert [line.get("decision") for line in lines] == ["deny"]


@pytest.mark.holds("RFC-0001/4/envelope")
@ERAS
@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param("no such tool", "E_VERB_UNSUPPORTED", id="no-name-of-a-tool"),
        pytest.param("sysecho.{node}.echo.stream", "E_VERB_UNSUPPORTED", id="verb-absent"),
        pytest.param("sysecho.{node}.other.invoke", "E_VERB_UNSUPPORTED", id="capability-absent"),
        pytest.param("gpio.{node}.echo.invoke", "E_KIND_UNSUPPORTED", id="kind-absent"),
        pytest.param(f"sysecho.{ABSENT_NODE}.echo.invoke", "E_SAFETY_DENIED", id="node-absent"),
    ],
)
async def test_a_name_that_is_no_tool_of_this_caller(demo: Demo, era: str, name: str, code: str) -> None:
    error = await failed_call(demo, era, name.format(node=demo.real_node), {"message": "x"})
    assert error["code"] == code


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


@pytest.mark.parametrize("path", ["/mcp", "/devices/connect", "/healthz", "/schemas/"])
async def test_a_page_in_a_browser_cannot_use_a_name_of_its_own(demo: Demo, path: str) -> None:
    async with httpx2.AsyncClient(base_url=demo.base_url) as http:
        assert (await http.get(path, headers={"Host": "attacker.example"})).status_code == 421
        assert (await http.get(path, headers={"Origin": "http://attacker.example"})).status_code == 403


class Publisher:
    """A client that can write to the broker."""

    def __init__(self, demo: Demo) -> None:
        address = parse_host_port(demo.facts["broker"])
        self._client = paho.Client(CallbackAPIVersion.VERSION2)
        self._client.connect(address.host, address.port)
        self._client.loop_start()

    async def put(self, topic: str, payload: bytes) -> None:
        info = self._client.publish(topic, payload, qos=1, retain=True)
        await asyncio.to_thread(info.wait_for_publish, 10)
        assert info.is_published()

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


async def count(demo: Demo, line: str) -> float:
    async with metrics_client(demo.metrics) as http:
        metrics = (await http.get("/metrics")).text
    return next((float(row.rpartition(" ")[2]) for row in metrics.splitlines() if row.startswith(line)), 0.0)


async def until_counted(demo: Demo, line: str, before: float) -> None:
    async with asyncio.timeout(30):
        while await count(demo, line) <= before:
            continue


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        pytest.param(b"not json", "not_json", id="not-json"),
        pytest.param(b'{"a":1,"a":2}', "not_json", id="a-key-twice"),
        pytest.param(b"[" * 10_000, "not_json", id="deep"),
        pytest.param(b"{}", "schema", id="empty"),
    ],
)
async def test_a_manifest_that_no_rule_lets_through_is_counted_by_its_reason(
    demo: Demo, payload: bytes, reason: str
) -> None:
    line = f'edge_relay_manifests_total{{outcome="rejected",reason="{reason}",way="broker"}}'
    before = await count(demo, line)
    publisher = Publisher(demo)
    try:
        await publisher.put(topics.announce(NODE_ID), payload)
        await until_counted(demo, line, before)
    finally:
        await publisher.put(topics.announce(NODE_ID), b"")
        publisher.close()


async def test_a_node_of_another_root_is_never_listed(demo: Demo) -> None:
    stranger = SimulatedCa("another root").issue(NODE_ID, "demo")
    line = 'edge_relay_identities_total{verdict="chain"}'
    before = await count(demo, line)
    publisher = Publisher(demo)
    try:
        await publisher.put(topics.identity(NODE_ID), stranger.leaf_pem.encode("ascii"))
        await until_counted(demo, line, before)
        async with demo.client() as client:
            assert not any(NODE_ID in tool.name for tool in (await client.list_tools()).tools)
    finally:
        await publisher.put(topics.identity(NODE_ID), b"")
        publisher.close()
