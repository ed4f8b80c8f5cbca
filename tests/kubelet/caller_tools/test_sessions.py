from pathlib import Path
from typing import Any

import pytest

from kubelet.caller_tools import sessions as sessions_module
from kubelet.caller_tools.sessions import (
    MAX_UNREAD,
    MAX_UNREAD_BYTES_OF_ALL,
    CallerNames,
    CallerNamesError,
    Session,
    SessionRefusedError,
    Sessions,
)
from schemas.caller_tools import MAX_SESSIONS
from schemas.files import UntrustedFileError
from schemas.process.logs import make_logger
from tests.fakes.caller_tools import ANT, BEE, MEMORY, OTHER_OWNER, OWNER, SEND
from tests.fakes.lines import LogLines


@pytest.fixture
def sessions(log: LogLines) -> Sessions:
    return Sessions(names(None, log), make_logger("kubelet", log))


def opened(session_id: str = ANT, caller_id: str = "ant", owner: str = OWNER, *tools: Any) -> Any:
    lent = [dict(tool) for tool in tools or (MEMORY,)]
    return {"session_id": session_id, "caller_id": caller_id, "owner": owner, "tools": lent}


@pytest.mark.holds("CALLER-TOOLS/data/declaration")
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
    assert session.unread[0][0] == "1"
    session.unread.clear()
    # 180 000 bytes each, as they are written.
    assert all(session.keep_unread(letter * 30_000) for letter in "éèàùç")
    assert not session.keep_unread("ü" * 30_000)
    assert "".join(text[0] for text, _ in session.unread) == "èàùçü"


def test_unread_messages_of_all_sessions_are_bounded_by_size_and_the_longest_mailbox_loses_first(
    sessions: Sessions,
) -> None:
    small, *large = [
        sessions.open(opened(f"gogol_20261122_021500_0000000{number}", f"c{number}")) for number in range(9)
    ]
    assert sessions.keep_unread(small, "small")
    kept = [sessions.keep_unread(session, "x" * 190_000) for _ in range(5) for session in large]
    assert kept.count(True) == 22
    assert [text for text, _ in small.unread] == ["small"]
    assert sum(size for session in sessions for _, size in session.unread) <= MAX_UNREAD_BYTES_OF_ALL
    assert all(session.unread for session in large)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "caller_ids.json"


def names(file: Path | None, log: LogLines) -> CallerNames:
    return CallerNames(file, make_logger("kubelet", log))


def test_a_name_belongs_to_the_first_that_used_it(file: Path, log: LogLines) -> None:
    known = names(file, log)
    assert known.claim("ant", "a")
    assert known.claim("ant", "a")
    assert not known.claim("ant", "b")
    assert known.claim("bee", "b")


def test_it_still_does_after_a_restart(file: Path, log: LogLines) -> None:
    assert names(file, log).claim("ant", "a")
    assert not names(file, log).claim("ant", "b")
    assert names(file, log).claim("ant", "a")


def test_only_its_user_can_read_the_file(file: Path, log: LogLines) -> None:
    names(file, log).claim("ant", "a")
    assert file.stat().st_mode & 0o777 == 0o600


def test_one_owner_cannot_take_all_names(file: Path, log: LogLines) -> None:
    known = names(file, log)
    count = sessions_module.MAX_NAMES_OF_ONE_OWNER
    assert [known.claim(f"ant-{number}", "a") for number in range(count + 1)] == [True] * count + [False]
    assert known.claim("bee", "b")
    assert log.entries("caller_id refused: no more are kept")


def test_all_owners_together_have_a_limit(log: LogLines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_NAMES", 2)
    known = names(None, log)
    assert [known.claim(name, name) for name in "abc"] == [True, True, False]


def test_a_name_that_cannot_be_kept_is_refused(tmp_path: Path, log: LogLines) -> None:
    known = names(tmp_path / "missing" / "file", log)
    assert not known.claim("ant", "a")
    assert log.entries("caller_id refused: it cannot be kept")


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"ant":1}', b"\xff"])
def test_a_damaged_file_ends_the_start_with_what_to_do(file: Path, log: LogLines, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(CallerNamesError, match="is damaged: remove it"):
        names(file, log)


def test_a_link_is_not_read(tmp_path: Path, file: Path, log: LogLines) -> None:
    (tmp_path / "elsewhere").write_text('{"ant": "evil"}')
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UntrustedFileError):
        names(file, log)
