"""A node that connects or disconnects is one line of the log."""

from relay.routing.port import NodeRef
from relay.sessions.connection_log import connection_log
from schemas.process.logs import make_logger
from tests.fakes.lines import LogLines
from tests.fakes.signer import NODE_ID

NODE = NodeRef("acme", NODE_ID, "a-session")


def test_each_session_that_begins_or_ends_is_one_line() -> None:
    lines = LogLines()
    written = connection_log(make_logger("relay", lines))
    for connected in (True, False):
        written(NODE, connected)
    facts = [(line["event"], line["node_id"], line["tenant"], line["session_id"]) for line in lines.entries()]
    assert facts == [
        ("node connected", NODE_ID, "acme", "a-session"),
        ("node disconnected", NODE_ID, "acme", "a-session"),
    ]
