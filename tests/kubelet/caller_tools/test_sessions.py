from typing import Any

import pytest

from kubelet.caller_tools import sessions as sessions_module
from kubelet.caller_tools.sessions import MAX_UNREAD, CallerNames, Session, SessionRefusedError, Sessions
from schemas.caller_tools import MAX_SESSIONS
from schemas.process.logs import make_logger
from tests.fakes.caller_tools import ANT, BEE, MEMORY, OTHER_OWNER, OWNER, SEND
from tests.fakes.lines import LogLines


@pytest.fixture
def sessions(log: LogLines) -> Sessions:
    return Sessions(CallerNames(None, make_logger("kubelet", log)), make_logger("kubelet", log))


def opened(session_id: str = ANT, caller_id: str = "ant", owner: str = OWNER, *tools: Any) -> Any:
    lent = [dict(tool) for tool in tools or (MEMORY,)]
    return {"session_id": session_id, "caller_id": caller_id, "owner": owner, "tools": lent}


def test_a_session_lends_its_tools_and_a_missing_schema_is_any_object(sessions: Sessions) -> None:
    session = sessions.open(opened(ANT, "ant", OWNER, MEMORY, SEND))
    assert session.tools["get_memory"] == {**MEMORY, "inputSchema": {"type": "object"}}
    assert session.tools["send_response"] == SEND


def test_declared_again_the_tools_are_replaced(sessions: Sessions) -> None:
    sessions.open(opened())
    session = sessions.open(opened(ANT, "ant", OWNER, SEND))
    assert session is sessions.get(ANT)
    assert list(session.tools) == ["send_response"]


def test_a_change_is_called_back_and_a_repetition_is_none(sessions: Sessions) -> None:
    seen: list[Session | None] = []
    sessions.on_change(seen.append)
    session = sessions.open(opened())
    sessions.open(opened())
    sessions.open(opened(ANT, "ant", OWNER, SEND))
    sessions.end(ANT)
    sessions.end(ANT)
    assert seen == [None, None, session]


def test_the_only_session_is_none_of_two(sessions: Sessions) -> None:
    assert sessions.only() is None
    first = sessions.open(opened())
    assert sessions.only() is first
    sessions.open(opened(BEE, "bee"))
    assert sessions.only() is None
    sessions.end(BEE)
    assert sessions.only() is first


def test_a_caller_id_of_another_owner_is_refused(sessions: Sessions) -> None:
    sessions.open(opened())
    with pytest.raises(SessionRefusedError, match="its caller_id belongs to another"):
        sessions.open(opened(BEE, "ant", OTHER_OWNER))
    assert sessions.get(BEE) is None


def test_two_sessions_of_one_owner_may_share_its_name(sessions: Sessions) -> None:
    sessions.open(opened())
    sessions.open(opened(BEE, "ant"))
    assert len(sessions) == 2


@pytest.mark.parametrize(("caller_id", "owner"), [("bee", OWNER), ("ant", OTHER_OWNER)])
def test_a_session_does_not_pass_to_another_caller(sessions: Sessions, caller_id: str, owner: str) -> None:
    session = sessions.open(opened())
    with pytest.raises(SessionRefusedError, match="it belongs to another caller"):
        sessions.open(opened(ANT, caller_id, owner, SEND))
    assert list(session.tools) == ["get_memory"]


def test_a_name_that_is_declared_twice_is_lent_by_neither(sessions: Sessions, log: LogLines) -> None:
    other = {**SEND, "name": "get_memory"}
    session = sessions.open(opened(ANT, "ant", OWNER, MEMORY, SEND, other))
    assert list(session.tools) == ["send_response"]
    assert log.entries("lent tools refused: a name is declared twice")


def test_the_number_of_sessions_has_a_limit(sessions: Sessions) -> None:
    for number in range(MAX_SESSIONS):
        sessions.open(opened(f"gogol_20261122_020000_{number:08x}"))
    with pytest.raises(SessionRefusedError, match="too many are live"):
        sessions.open(opened("gogol_20261122_020000_ffffffff"))
    assert len(sessions) == MAX_SESSIONS


def test_what_all_sessions_lend_has_a_limit(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_LENT_BYTES", 500)
    large = {**MEMORY, "description": "x" * 300}
    sessions.open(opened(ANT, "ant", OWNER, large))
    with pytest.raises(SessionRefusedError, match="too large together"):
        sessions.open(opened(BEE, "bee", OWNER, large))
    sessions.end(ANT)
    sessions.open(opened(BEE, "bee", OWNER, large))
    sessions.open(opened(BEE, "bee", OWNER, large))
    with pytest.raises(SessionRefusedError):
        sessions.open(opened(BEE, "bee", OWNER, large, {**large, "name": "other"}))
    assert len(sessions) == 0


def test_unread_messages_are_bounded_by_number_and_by_size() -> None:
    session = Session(ANT, "ant", OWNER, {})
    assert all(session.keep_unread(str(number)) for number in range(MAX_UNREAD))
    assert not session.keep_unread("one more")
    assert session.unread[0] == "1"
    assert not session.keep_unread("x" * 200_000)
    session.unread.clear()
    assert session.keep_unread("x" * 196_608)
    assert not session.keep_unread("y" * 196_608)
    assert [text[0] for text in session.unread] == ["y"]
