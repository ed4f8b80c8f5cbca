"""22. An operator names a kind that an installed package brings.

Steps: install the package · start the system with the kind named · list and call it in both views and both
eras · let its handler fail · look at what is served, and at who imported the package's code. On a node whose
environment is not to be changed: install it for the daemon alone, and call it.
"""

import asyncio
import base64
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from relay.cli.demo.local_system import kubelet_command, list_tools, relay_command
from schemas.projection import META_IDEMPOTENCY_KEY
from schemas.registry import SchemaRegistry
from tests.fakes.demo import Demo, error_of, local_system, running_demo
from tests.fakes.guide import png
from tests.fakes.kind_package import (
    INPUT_REF,
    KIND,
    OUTPUT_REF,
    KindPackage,
    handler_doing,
    imported,
    wheel,
)
from tests.fakes.polling import until

ERAS = pytest.mark.parametrize("era", ["2026-07-28", "legacy"])
FAULT = {"message": "The lens is covered.", "suggested_fix": "Ask for it to be uncovered."}
PICTURE = base64.b64encode(png(640, 480)).decode("ascii")
BOUND_S = 120
DESCRIPTION = "Switch one relay of a relay board on or off."


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    KindPackage().install(site)
    return site


def camera() -> KindPackage:
    """Return a package whose verb of its own answers with all that a result can have."""
    node_id = KindPackage().output["properties"]["node_id"]
    text = {"type": "string", "maxLength": 32_768, "pattern": r"^[\x20-\x7E]*$"}
    package = KindPackage(handler=CAMERA_HANDLER)
    package.row["verbs"] = {"look": package.row["verbs"].pop("set")}
    package.row["verbs"]["look"] |= {"verbatim": [], "foreign_texts": [], "free_texts": [["log", "text"]]}
    package.row["verbs"]["look"]["description"] = "Look, at 21 \u00b0C."
    package.row["faults"] = {"covered": FAULT}
    line = {"type": "object", "additionalProperties": False, "properties": {"text": text}}
    package.output |= {
        "required": ["node_id", "seen_at", "lux"],
        "properties": {
            "node_id": node_id,
            "seen_at": {"type": "string", "maxLength": 32, "format": "date-time"},
            "lux": {"type": ["number", "null"]},
            "log": {"type": "array", "maxItems": 4, "items": line},
            "picture": {
                "type": "string",
                "contentEncoding": "base64",
                "contentMediaType": "image/png",
                "maxLength": 245_760,
                "pattern": "^[A-Za-z0-9+/=]+$",
            },
        },
    }
    return package


CAMERA_HANDLER = handler_doing(f"""
    from kubelet.handlers.base import ToolFault

    if not arguments["on"]:
        raise ToolFault("covered", "device text")
    return {{
        "node_id": self._node_id,
        "seen_at": "2026-11-25T22:45:49+00:00",
        "lux": None,
        "log": [{{"text": "T\u00fcr  offen"}}, {{"text": "x" * 32_768}}],
        "picture": {PICTURE!r},
    }}
""").replace('["set"]', '["look"]')


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    site = tmp_path_factory.mktemp("camera")
    camera().install(site)
    options = ("--nodes", "1", "--kinds", KIND)
    with running_demo(tmp_path_factory.mktemp("demo"), *options, sources=site) as running:
        yield running


def between_marks(text: str) -> str:
    """Return what stands between the marks of a result with sentences of third parties."""
    found = re.fullmatch(r"[^\n]+\n<<<([0-9a-f]{16})\n(.+)\n>>>\1", text, re.DOTALL)
    assert found is not None, text
    return found[2]


@ERAS
@pytest.mark.parametrize("view", ["", "?view=kinds"])
async def test_an_agent_reads_all_that_a_result_can_have(seeing: Demo, era: str, view: str) -> None:
    name = "acmerb.look" if view else f"acmerb.{seeing.real_node}.relays.look"
    arguments = {"on": True, "node": seeing.real_node} if view else {"on": True}
    async with seeing.client(era, view) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        result = await client.call_tool(name, arguments)
        failed = await client.call_tool(name, {**arguments, "on": False})
    assert (tools[name].description or "").startswith("Look, at 21 \u00b0C.")
    assert result.structured_content == {
        "node_id": seeing.real_node,
        "seen_at": "2026-11-25T22:45:49+00:00",
        "lux": None,
        "log": [{"text": r"T\xfcr \x20offen"}, {"text": "x" * 32_768}],
    }
    text, picture = (block.model_dump(by_alias=True, exclude_none=True) for block in result.content)
    assert json.loads(between_marks(text["text"])) == result.structured_content
    assert picture == {"type": "image", "mimeType": "image/png", "data": PICTURE}
    error = error_of(failed)
    assert error["message"] == f"covered: {FAULT['message']}"
    assert error["suggested_fix"] == FAULT["suggested_fix"]


def key(text: str) -> Any:
    return {META_IDEMPOTENCY_KEY: text}


async def test_what_is_told_again_under_a_key_has_the_image_and_the_fix_too(seeing: Demo) -> None:
    tool = f"acmerb.{seeing.real_node}.relays.look"
    async with seeing.client() as client:
        seen = [await client.call_tool(tool, {"on": True}, meta=key("a")) for _ in "12"]
        failed = [await client.call_tool(tool, {"on": False}, meta=key("b")) for _ in "12"]
    [first, again] = [[block.model_dump() for block in each.content] for each in seen]
    assert between_marks(first.pop(0)["text"]) == between_marks(again.pop(0)["text"])
    assert first == again
    assert len(again) == 1
    assert [error_of(each)["suggested_fix"] for each in failed] == [FAULT["suggested_fix"]] * 2


@pytest.fixture(scope="module")
def named(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """The system with the kind, and one mock node, which does not have it."""
    options = ("--nodes", "1", "--kinds", KIND)
    with running_demo(tmp_path_factory.mktemp("demo"), *options, sources=site) as running:
        yield running


def tool_of(demo: Demo) -> str:
    return f"acmerb.{demo.real_node}.relays.set"


@ERAS
async def test_the_tool_is_listed_and_called(named: Demo, era: str) -> None:
    async with named.client(era) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        result = await client.call_tool(tool_of(named), {"on": True})
    assert tools[tool_of(named)].description == DESCRIPTION
    assert result.structured_content == {"node_id": named.real_node, "on": True, "label": r"pump\x201"}


@ERAS
async def test_in_the_kinds_view_it_is_one_tool(named: Demo, era: str) -> None:
    async with named.client(era, "?view=kinds") as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        result = await client.call_tool("acmerb.set", {"node": named.real_node, "on": True})
        found = await client.call_tool("find_nodes", {"kind": KIND})
    assert "acmerb.set" in names
    assert dict(result.structured_content or {})["on"] is True
    assert [node["node_id"] for node in dict(found.structured_content or {})["nodes"]] == [named.real_node]


async def test_a_url_selects_the_kind(named: Demo) -> None:
    async with named.client(query=f"?kinds={KIND}") as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == [tool_of(named)]


async def test_arguments_that_its_document_does_not_admit_are_refused(named: Demo) -> None:
    async with named.client() as client:
        result = await client.call_tool(tool_of(named), {"on": "yes"})
    assert error_of(result)["code"] == "E_MANIFEST_INVALID"


async def test_a_handler_that_raises_costs_its_caller_an_error_and_leaves_one_traceback(named: Demo) -> None:
    async with named.client() as client:
        result = await client.call_tool(tool_of(named), {"on": False})
        again = await client.call_tool(tool_of(named), {"on": True})
    assert error_of(result)["code"] == "E_INTERNAL"
    assert "stuck" not in json.dumps(error_of(result))
    assert again.is_error is False

    def failures() -> list[str]:
        lines = named.log("kubelet").read_text("utf-8").splitlines()
        return [line for line in lines if '"handler failed"' in line]

    await until(failures)  # a thread writes the log
    [failed] = failures()
    assert "acme_relay_board/handler.py" in failed


def test_the_node_alone_has_imported_the_package(named: Demo, site: Path) -> None:
    assert named.facts["relay_pid"]
    assert imported(site) == ["acme_relay_board", "acme_relay_board.handler"]


@pytest.mark.parametrize("ref", [INPUT_REF, OUTPUT_REF])
def test_its_documents_are_served(named: Demo, ref: str) -> None:
    answer = httpx2.get(f"{named.base_url}/schemas/{ref}", trust_env=False)
    assert answer.json()["$id"] == f"mcp://schemas/{ref}"


@pytest.mark.parametrize("ref", ["manifest@1.0.0", "manifest@1.1.0"])
def test_the_served_manifest_document_keeps_its_bytes(named: Demo, ref: str) -> None:
    answer = httpx2.get(f"{named.base_url}/schemas/{ref}", trust_env=False)
    assert answer.content == SchemaRegistry().documents[ref]


@pytest.mark.long
async def test_a_daemon_loads_the_kind_that_was_installed_for_it_alone(site: Path, tmp_path: Path) -> None:
    (tmp_path / "system").mkdir()
    async with local_system(tmp_path / "system", 0) as system, asyncio.timeout(BOUND_S):
        processes, plan = system.processes, replace(system.plan, kinds=(KIND,))
        install = (sys.executable, "-P", "-m", "kubelet", "kind", "install", str(wheel(tmp_path)))
        await processes.output([*install, "--state-dir", str(plan.kubelet_state)])
        await processes.stop("kubelet")
        await processes.stop("relay")
        await processes.start("relay", relay_command(plan), {"PYTHONPATH": str(site)})
        await processes.until_listening(plan.relay_port)
        await processes.start("kubelet", kubelet_command(plan))
        name = f"acmerb.{system.real_node}.relays.set"
        async with system.client() as client:

            async def listed() -> bool:
                processes.check()
                return name in {tool.name for tool in await list_tools(client)}

            async with client.listen(tools_list_changed=True) as changes:
                while not await listed():
                    await anext(changes)
            result = await client.call_tool(name, {"on": True})
    assert dict(result.structured_content or {})["on"] is True
