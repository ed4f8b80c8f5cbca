"""The system has no thread left for a process: a service at its limit of tasks, or a user at theirs.

Made by stacks that are larger than what is left of the address space: a new thread has no room for its own.
"""

import asyncio
from pathlib import Path
from typing import NoReturn

import pytest

from tests.faults.site import BROKER, NODE, RELAY, Site, until

pytestmark = pytest.mark.long

MIB = 1 << 20
LARGE_STACKS = ("prlimit", f"--stack={256 * MIB}")
NO_ROOM = ("prlimit", f"--stack={64 << 30}", f"--as={16 << 30}")
REFUSAL = "no thread can be started: raise TasksMax= of the service, or the user's limit"


async def test_both_programs_go_on_with_the_threads_that_they_have(tmp_path: Path) -> None:
    async with Site.running(tmp_path, node=LARGE_STACKS, relay=LARGE_STACKS) as site:

        async def short_of_threads() -> bool:
            # Each time anew: a thread that lived when the limit was set leaves its room to the next.
            for program in (NODE, RELAY):
                site.leave_address_space(program, 128 * MIB)
            return bool(site.log(NODE, "disks are not read"))

        # The C library keeps the stack of the last thread that ended for the next: this one takes it.
        waiting = asyncio.create_task(keep_a_thread_waiting(site.plan.loopback_port))
        await until(short_of_threads)
        waiting.cancel()
        await asyncio.wait((waiting,))
        await site.until_logged(NODE, "disks are not read", "can't start new thread")
        await site.processes.kill(BROKER)
        await site.start_broker()
        await site.until_page(RELAY, lambda page: page["broker"]["ready"])
        await site.until_page(NODE, lambda page: page["broker"]["ready"])
        assert (await site.call()).code == "ok"
        assert len(site.log(RELAY, "node connected")) == 1


async def keep_a_thread_waiting(port: int) -> NoReturn:
    """Send the node no request over a connection, and over another one when it closes that."""
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()


async def test_a_program_that_gets_none_ends_with_what_to_do(tmp_path: Path) -> None:
    async with Site.stopped(tmp_path) as site:
        site.node = site.relay = NO_ROOM
        for program in (NODE, RELAY):
            ended = await site.refused(program)
            assert ended.startswith(f"{program} ended with status 3: ")
            assert ended.endswith(f"{program}: {REFUSAL}")
