"""34. A reader of docs/cluster.md sets up two relays of one fleet.

Steps: an administrator makes the account, users and certificates · the nats-server runs with what was made,
and has the streams · relay1 has the CA's key, relay2 starts from its archive · a board enrols, and connects
to one of them · an agent's call is answered by way of each.
"""

import re
from pathlib import Path

import pytest

from tests.end_to_end.test_21_a_reader_types_the_readme import typing_on, wheels
from tests.fakes.story import Block, blocks_of

__all__ = ["wheels"]

pytestmark = pytest.mark.long

PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text("utf-8")
SET_UP = PAGE.split("\n## Set up\n")[1].split("\n## ")[0]
FIRST = "127.0.0.1 relay.example relay1.example nats.example\n127.0.0.2 relay2.example"
SECOND = FIRST.replace(" relay.example", "").replace(" relay2.example", " relay2.example relay.example")
# What its sixth terminal shows.
LOG_OF_RELAY2 = "../5-relay2.printed"
# The agent's machine asks another name server.
BY_THE_OTHER = """
. edge/bin/activate
unshare --mount bash -ec 'mount --bind hosts /etc/hosts; {call}'
"""


@pytest.mark.timeout(600)  # five environments, each begins with an installation of pip
def test_the_page_ends_in_an_answer_by_way_of_each_relay(tmp_path: Path, wheels: Path) -> None:
    blocks = blocks_of(SET_UP)
    with typing_on(tmp_path, wheels, FIRST) as typing:
        for block in blocks:
            printed = typing.type(block)
        agent = blocks[-1]
        (call,) = [line for line in agent.lines.splitlines() if line.startswith("relay call ")]
        (tmp_path / agent.machine / "hosts").write_text(f"127.0.0.1 localhost\n{SECOND}\n", "ascii")
        lines = BY_THE_OTHER.format(call=call.replace("'", "'\\''"))
        typing.type(Block("relay2", '"node named"', f"tail --lines=+1 --follow {LOG_OF_RELAY2}\n"))
        by_the_other = typing.type(Block(agent.machine, None, lines))
        status = typing.type(Block("relay2", None, ". edge/bin/activate\nrelay status\n"))
        log = typing.type(Block("relay2", None, f"cat {LOG_OF_RELAY2}\n"))
    assert "manifest rejected" not in log
    assert re.search(r'^\{"one": ', printed, re.MULTILINE)
    assert re.search(r'^\{"one": ', by_the_other, re.MULTILINE)
    assert re.search(r"^cluster +connected to tls://nats\.example:4222: 2 relays, ", status, re.MULTILINE)
