"""A handler of another package blocks, ends the program, returns nonsense or 100 MB.

Its own call gets an error, by its deadline. Calls of other capabilities and the node's heartbeats go on.
"""

import asyncio
from pathlib import Path

from tests.fakes.kind_package import KIND, KindPackage, handler_doing
from tests.faults.site import NODE, RELAY, Agent, Answer, Site

ACTS = ["answers", "blocks", "ends the program", "returns nonsense", "returns 100 MB"]
HANDLER = handler_doing("""
    import threading
    match arguments["act"]:
        case "blocks":
            threading.Event().wait()
        case "ends the program":
            raise SystemExit(1)
        case "returns nonsense":
            return [object()]
        case "returns 100 MB":
            return {"node_id": self._node_id, "on": True, "label": "x" * 100_000_000}
    return {"node_id": self._node_id, "on": True}
""")


def install(site: Path) -> None:
    package = KindPackage(handler=HANDLER)
    package.row["verbs"]["set"]["verbatim"] = []
    package.input |= {"required": ["act"], "properties": {"act": {"type": "string", "enum": ACTS}}}
    package.install(site)


async def acted(agent: Agent, act: str) -> tuple[Answer, list[Answer]]:
    """Have the handler do ``act``; return what its call ends with, and calls of echo meanwhile."""
    call = asyncio.create_task(agent.call("acmerb.{}.relays.set", act=act))
    echoes = [await agent.call()]
    while not call.done():
        await asyncio.wait({call}, timeout=0.2)  # echo admits ten calls a second
        echoes.append(await agent.call())
    return await call, echoes


async def test_what_a_handler_does_harms_its_own_call_alone(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    install(packages)
    async with Site.stopped(tmp_path, kinds=(KIND,)) as site:
        site.node = site.relay = ("env", f"PYTHONPATH={packages}")
        await site.start_all()
        async with site.agent() as agent:
            results = [await acted(agent, act) for act in (*ACTS[2:], "answers", "blocks", "answers")]
        assert [answer.code for answer, _ in results] == [
            *("E_INTERNAL", "E_INTERNAL", "E_INTERNAL"),
            *("ok", "E_DEADLINE_EXCEEDED", "E_DEADLINE_EXCEEDED"),
        ]
        assert {echo.code for _, echoes in results for echo in echoes} == {"ok"}
        await site.until_page(NODE, lambda page: all(part["ready"] for part in page.values()))
        assert len(site.log(RELAY, "node connected")) == 1
