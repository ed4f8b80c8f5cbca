"""16. A reader of docs/caller-tools.md starts its two programs.

Steps: a token by the page's command · the page's caller lends its tool to this machine's node · the page's
local agent sees it, calls it, and says thank you · both end by themselves · a caller that is interrupted, or
killed, leaves nothing at the node.
"""

import asyncio
import os
import sys
from pathlib import Path
from signal import Signals

import httpx2
import pytest

from tests.fakes.command_lines import CommandLines
from tests.fakes.demo import Demo
from tests.fakes.guide import snippets
from tests.fakes.polling import before_asking_again, until

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


async def until_node_has(demo: Demo, expected: str) -> None:
    """Wait until that is what the node says; what it has dropped or refused may follow."""
    said = ""
    try:
        async with asyncio.timeout(BOUND_S), httpx2.AsyncClient(trust_env=False) as http:
            while not (said := await sessions_of(demo, http)).startswith(expected):
                await before_asking_again()
    except TimeoutError:
        pytest.fail(f"the node says {said!r}, not {expected!r}")


def polls_of(demo: Demo) -> int:
    """Return how many calls for events the relay has begun."""
    return sum(line.get("tool") == "session_events" and "decision" in line for line in demo.audit())


async def started_caller(demo: Demo, commands: CommandLines, directory: Path) -> asyncio.subprocess.Process:
    """Start the page's caller with a token of its own."""
    file = directory / "caller.py"
    file.write_text(PROGRAMS[file.name], "utf-8")
    place = ("--public-url", demo.base_url, "--state-dir", str(demo.state("relay")), "--tenant", "demo")
    issued = commands.run("relay", "token", "issue", "--sub", "ant", "--scope", "sessions:message", *place)
    assert issued.code == 0, issued
    node, url, token = demo.real_node[:10], demo.facts["mcp_url"], issued.out.strip()
    return await started(sys.executable, "-P", str(file), url, node, EDGE_TOKEN=token, NO_PROXY="*")


@pytest.mark.parametrize(("name", "lines"), [("caller.py", 41), ("agent.py", 20)])
def test_the_programs_of_the_page_are_as_short_as_promised(name: str, lines: int) -> None:
    assert len(PROGRAMS[name].splitlines()) <= lines


async def test_the_callers_tool_reaches_the_local_agent_and_its_answer_comes_back(
    demo: Demo, commands: CommandLines, tmp_path: Path
) -> None:
    agent_file = tmp_path / "agent.py"
    agent_file.write_text(PROGRAMS[agent_file.name], "utf-8")
    caller = await started_caller(demo, commands, tmp_path)
    python = (sys.executable, "-P")
    local = (*python, "-m", "kubelet", "mcp", "--state-dir", str(demo.state("kubelet")))
    agent = await started(*python, str(agent_file), *local)
    assert await finished(agent) == "They dance.\n"
    assert await finished(caller) == "lending get_memory\nthe node's agent says: Thank you.\n"
    # The others who use this node find no session.
    await until_node_has(demo, "0 sessions, 0 local clients")


@pytest.mark.holds("CALLER-TOOLS/errors/disconnected")
@pytest.mark.parametrize("signal", [Signals.SIGINT, Signals.SIGKILL], ids=["Ctrl-C", "killed"])
async def test_a_caller_that_is_interrupted_or_killed_leaves_no_session(
    demo: Demo, commands: CommandLines, tmp_path: Path, signal: Signals
) -> None:
    before = polls_of(demo)
    caller = await started_caller(demo, commands, tmp_path)
    assert caller.stdout is not None
    assert await asyncio.wait_for(caller.stdout.readline(), BOUND_S) == b"lending get_memory\n"
    await until_node_has(demo, "1 sessions, 0 local clients")
    # From its first poll on; before that it has nothing open by which its end could be seen.
    await until(lambda: polls_of(demo) > before, BOUND_S)
    caller.send_signal(signal)
    await caller.communicate()
    await until_node_has(demo, "0 sessions, 0 local clients")
