"""16. A reader of docs/caller-tools.md starts its two programs.

Steps: a token by the page's command · the page's caller lends its tool to this machine's node · the page's
local agent sees it, calls it, and says thank you · both end by themselves.
"""

import asyncio
import os
import sys
from pathlib import Path

import httpx2
import pytest

from tests.fakes.command_lines import CommandLines
from tests.fakes.demo import Demo
from tests.fakes.guide import snippets
from tests.fakes.polling import before_asking_again

BOUND_S = 60
PAGE = Path(__file__).parents[2] / "docs" / "caller-tools.md"
PROGRAMS = snippets(PAGE.read_text("utf-8"))


async def finished(process: asyncio.subprocess.Process) -> str:
    """Return what a program has printed when it ends, which it does by itself."""
    async with asyncio.timeout(BOUND_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def started(*command: str, **variables: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, **variables}
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environment)


async def sessions_of(demo: Demo, http: httpx2.AsyncClient) -> str:
    """Return what the node says of its sessions and local agents."""
    page = (await http.get(demo.facts["loopback_url"] + "/readyz")).json()
    return str(page["subsystems"]["caller tools"]["state"])


@pytest.mark.parametrize(("name", "lines"), [("caller.py", 40), ("agent.py", 20)])
def test_the_programs_of_the_page_are_as_short_as_promised(name: str, lines: int) -> None:
    assert len(PROGRAMS[name].splitlines()) <= lines


async def test_the_callers_tool_reaches_the_local_agent_and_its_answer_comes_back(
    demo: Demo, commands: CommandLines, tmp_path: Path
) -> None:
    caller_file, agent_file = tmp_path / "caller.py", tmp_path / "agent.py"
    for file in (caller_file, agent_file):
        file.write_text(PROGRAMS[file.name], "utf-8")
    place = ("--public-url", demo.base_url, "--state-dir", str(demo.state("relay")), "--tenant", "demo")
    issued = commands.run("relay", "token", "issue", "--sub", "ant", "--scope", "sessions:message", *place)
    assert issued.code == 0, issued
    node, url, token = demo.real_node[:10], demo.facts["mcp_url"], issued.out.strip()
    python = (sys.executable, "-P")
    caller = await started(*python, str(caller_file), url, node, EDGE_TOKEN=token, NO_PROXY="*")
    local = (*python, "-m", "kubelet", "mcp", "--state-dir", str(demo.state("kubelet")))
    agent = await started(*python, str(agent_file), *local)
    assert await finished(agent) == "They dance.\n"
    assert await finished(caller) == "lending get_memory\nthe node's agent says: Thank you.\n"
    # The others who use this node find no session.
    async with asyncio.timeout(BOUND_S), httpx2.AsyncClient(trust_env=False) as http:
        while await sessions_of(demo, http) != "0 sessions, 0 local clients":
            await before_asking_again()
