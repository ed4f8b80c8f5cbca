"""``kubelet status`` of a daemon that runs, with a relay and a broker that are real as far as it can tell."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.addresses import BrokerAddress
from schemas.frames import SUBPROTOCOLS, FrameReader
from schemas.identity_files import IdentityFiles
from schemas.manifest import etag_of
from tests.fakes.daemon import daemon
from tests.fakes.lines import LogLines
from tests.fakes.played_relay import PlayedRelay
from tests.fakes.signer import NODE_ID

pytestmark = pytest.mark.integration


async def kubelet(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kubelet", *arguments]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
    )


async def test_ten_lines_say_what_the_daemon_does_now(
    enrolled: IdentityFiles, log: LogLines, broker: BrokerAddress, reader: FrameReader
) -> None:
    relay = PlayedRelay(reader, subprotocols=SUBPROTOCOLS)
    async with relay.running(), daemon(enrolled.root, log, broker, relay.url) as running:
        end = await relay.next()
        await end.admit()
        announce = await end.accept()
        beat = await end.receive("heartbeat")
        await log.until("broker connected")
        waiting = await kubelet("status", "--state-dir", enrolled.root)
        assert (waiting.returncode, len(waiting.stdout.splitlines())) == (1, 10)
        assert "ready        no; calls: no command answered yet" in waiting.stdout
        echo = f"sysecho.{NODE_ID}.echo.invoke"
        await end.command(tool=echo, arguments={"message": "echo"})
        await end.command(tool=f"sysecho.{NODE_ID}.echo.other", arguments={})
        await running.until_ready()
        await end.send("heartbeat_ack", answers=beat.msg_id, broker_etag=etag_of(announce.wire))
        shown = await kubelet("status", "--state-dir", enrolled.root, "--json")
        status = json.loads(shown.stdout)
    assert (shown.returncode, status["ready"], status["node_id"]) == (0, True, NODE_ID)
    assert status["calls"]["outcomes"] == [
        {"code": "E_VERB_UNSUPPORTED", "hop": "node", "count": 1},
        {"code": "ok", "hop": "", "count": 1},
    ]
    assert status["broker"]["relay_received"] in status["broker"]["published"]


async def test_without_a_daemon_one_line_says_what_to_do(enrolled: IdentityFiles) -> None:
    nothing = await kubelet("status", "--state-dir", enrolled.root)
    assert nothing.returncode == 3
    assert (
        nothing.stderr == f"kubelet: nothing runs with {enrolled.root}: start it, or name its --state-dir\n"
    )
