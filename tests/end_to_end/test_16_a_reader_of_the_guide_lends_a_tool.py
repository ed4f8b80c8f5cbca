"""16. A reader of docs/caller-tools.md starts its two programs.

Steps: a token by the page's command · the page's caller lends its tool to this machine's node · the page's
local agent sees it, calls it, and says thank you · both end by themselves.
"""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from relay.demo.local_system import start_system
from relay.demo.processes import Processes
from schemas.addresses import mcp_url
from tests.fakes.demo import plan_below

BOUND_S = 60
PAGE = Path(__file__).parents[2] / "docs" / "caller-tools.md"
PROGRAMS = dict(
    re.findall(r"<!-- snippet: ([\w.]+) -->\n```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
)


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


@pytest.mark.parametrize(("name", "lines"), [("caller.py", 40), ("agent.py", 20)])
def test_the_programs_of_the_page_are_as_short_as_promised(name: str, lines: int) -> None:
    assert len(PROGRAMS[name].splitlines()) <= lines


async def test_the_callers_tool_reaches_the_local_agent_and_its_answer_comes_back(tmp_path: Path) -> None:
    caller_file, agent_file = tmp_path / "caller.py", tmp_path / "agent.py"
    for file in (caller_file, agent_file):
        file.write_text(PROGRAMS[file.name], "utf-8")
    async with Processes.running(tmp_path) as processes:
        plan = plan_below(tmp_path)
        system = await start_system(plan, 0, processes, lambda _: None)
        async with asyncio.timeout(BOUND_S):
            await system.until_listed()
        relay = (sys.executable, "-P", "-m", "relay")
        place = ("--public-url", plan.public_url, "--state-dir", str(plan.state.root), "--tenant", "demo")
        token = await finished(
            await started(*relay, "token", "issue", "--sub", "ant", "--scope", "sessions:message", *place)
        )
        node = system.real_node[:10]
        url = mcp_url(plan.public_url)
        caller = await started(
            sys.executable, "-P", str(caller_file), url, node, EDGE_TOKEN=token.strip(), NO_PROXY="*"
        )
        local = ("-P", "-m", "kubelet", "mcp", "--state-dir", str(plan.kubelet_state))
        python = sys.executable
        agent = await started(python, "-P", str(agent_file), python, *local)
        assert await finished(agent) == "They dance.\n"
        assert await finished(caller) == "lending get_memory\nthe node's agent says: Thank you.\n"
