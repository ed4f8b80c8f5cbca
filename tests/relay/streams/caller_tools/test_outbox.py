from collections.abc import Mapping
from typing import Any

import pytest

from relay.routing.port import AnnounceHandler, ConnectionHandler, FrameHandler
from relay.streams.caller_tools import endings as module
from relay.streams.caller_tools.endings import MAX_WAITING_BYTES_OF_ALL, Outbox
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType
from tests.fakes.hub import Hub

NODE = "node"


class Frames:
    """Frames to one node, which takes as many as ``accepts``; then it fails as ``failure``."""

    def __init__(self, accepts: int, failure: Failure = Failure.RATE_LIMITED) -> None:
        self.accepts = accepts
        self.failure = failure
        self.sent: list[Any] = []

    def send(self, _node_id: str, _frame_type: OneWayType, payload: Mapping[str, Any]) -> None:
        if not self.accepts:
            raise ToolError(self.failure)
        self.accepts -= 1
        self.sent.append(payload["n"])

    def on_frame(self, frame_type: OneWayType, handler: FrameHandler) -> None:
        raise NotImplementedError

    def on_connection(self, handler: ConnectionHandler) -> None:
        raise NotImplementedError

    def on_announce(self, handler: AnnounceHandler) -> None:
        raise NotImplementedError


def post(outbox: Outbox, *numbers: int) -> None:
    for number in numbers:
        outbox.post(NODE, OneWayType.CALLER_TOOL_RESULT, {"n": number})


def test_what_a_node_cannot_take_is_sent_later_and_in_order(hub: Hub) -> None:
    frames = Frames(1)
    outbox = Outbox(frames, hub.log)
    post(outbox, 1, 2, 3)
    assert frames.sent == [1]
    with pytest.raises(ToolError, match="E_RATE_LIMITED"):
        outbox.send(NODE, OneWayType.SESSION_END, {"n": 4})
    frames.accepts = 9
    outbox.flush()
    assert frames.sent == [1, 2, 3]
    outbox.send(NODE, OneWayType.SESSION_END, {"n": 4})
    assert frames.sent == [1, 2, 3, 4]


def test_nothing_waits_for_a_node_that_is_not_connected(hub: Hub) -> None:
    frames = Frames(0, Failure.NODE_OFFLINE)
    outbox = Outbox(frames, hub.log)
    post(outbox, 1, 2)
    frames.accepts = 9
    outbox.flush()
    assert frames.sent == []
    frames.accepts, frames.failure = 0, Failure.RATE_LIMITED
    post(outbox, 3)
    outbox.drop(NODE)
    frames.accepts = 9
    outbox.flush()
    assert frames.sent == []


def test_a_bug_with_one_nodes_frame_does_not_hold_up_those_of_others(hub: Hub) -> None:
    frames = Frames(0)
    outbox = Outbox(frames, hub.log)
    post(outbox, 1)
    outbox.post("other", OneWayType.SESSION_END, {})  # a node takes none without its number
    outbox.post("third", OneWayType.SESSION_END, {"n": 3})
    frames.accepts = 9
    outbox.flush()
    assert (frames.sent, len(outbox)) == ([1, 3], 0)
    assert len(hub.lines.entries("frame not sent")) == 1


def test_a_limited_number_waits(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    frames = Frames(0)
    dropped: list[OneWayType] = []
    outbox = Outbox(frames, hub.log, dropped.append)
    post(outbox, 1, 2, 3, 4)
    assert dropped == [OneWayType.CALLER_TOOL_RESULT] * 2
    outbox.post(NODE, OneWayType.SESSION_END, {"n": "end"})  # else the session would stay at the node
    assert len(outbox) == 3
    frames.accepts = 9
    outbox.flush()
    assert frames.sent == [1, 2, "end"]
    assert len(hub.lines.entries("frames dropped: the node does not read")) == 1
    frames.accepts = 0
    post(outbox, 5, 6, 7)
    assert len(hub.lines.entries("frames dropped: the node does not read")) == 2


def test_a_limited_size_waits(hub: Hub) -> None:
    frames = Frames(0)
    dropped: list[OneWayType] = []
    outbox = Outbox(frames, hub.log, dropped.append)
    for number in range(100):
        outbox.post(NODE, OneWayType.CALLER_TOOL_RESULT, {"n": number, "result": "x" * 190_000})
    assert len(outbox) == 100 - len(dropped) == 88
    frames.accepts = 100
    outbox.flush()
    assert frames.sent == list(range(88))
    post(outbox, 100)
    assert frames.sent[-1] == 100
    frames.accepts = 0
    post(outbox, 101, 102)
    assert len(outbox) == 2


def test_a_limited_size_waits_of_all_nodes_and_each_finds_room(hub: Hub) -> None:
    frames, dropped = Frames(0), list[OneWayType]()
    outbox = Outbox(frames, hub.log, dropped.append)
    nodes = [f"node {number}" for number in range(40)]

    def post_all(type_: OneWayType, size: int) -> int:
        before = len(outbox)
        for node_id in nodes:
            outbox.post(node_id, type_, {"n": 0, "result": "x" * size})
        return len(outbox) - before

    for _ in range(100):
        post_all(OneWayType.CALLER_TOOL_RESULT, 190_000)
    assert 0.9 < len(outbox) * 190_000 / MAX_WAITING_BYTES_OF_ALL < 1
    nodes = ["another"]
    assert 0 < sum(post_all(OneWayType.CALLER_TOOL_RESULT, 190_000) for _ in range(100)) < 30
    assert len(outbox) * 190_000 < MAX_WAITING_BYTES_OF_ALL
    assert post_all(OneWayType.SESSION_OPEN, 190_000) == 1  # else the session would end at the node
    assert post_all(OneWayType.SESSION_END, 100) == 1
    outbox.drop("node 0")
    assert post_all(OneWayType.CALLER_TOOL_RESULT, 190_000) == 1
    frames.accepts = 10_000
    outbox.flush()
    frames.accepts = 0
    nodes = ["node 1"]
    assert sum(post_all(OneWayType.CALLER_TOOL_RESULT, 190_000) for _ in range(100)) == 88
