from itertools import chain, repeat

from relay.streams.caller_tools.registry import SessionRegistry
from tests.fakes.caller_stage import CallerStage
from tests.fakes.signer import NOW_MS


async def test_an_id_names_the_time_and_is_drawn_again_while_a_session_has_it(stage: CallerStage) -> None:
    drawn = chain([b"\0\0\0\1", b"\0\0\0\1"], repeat(b"\0\0\0\2"))
    registry = SessionRegistry(lambda: NOW_MS, lambda _count: next(drawn))
    first = registry.new_id()
    assert first == "gogol_20251009_085320_00000001"
    await stage.open()
    (session,) = stage.hub.caller_sessions
    registry._sessions[first] = session  # noqa: SLF001 - a session of that id, which chance would not give
    assert registry.new_id() == "gogol_20251009_085320_00000002"


async def test_sessions_are_found_by_node_until_they_are_removed(stage: CallerStage) -> None:
    registry = stage.hub.caller_sessions
    session_ids = [await stage.open() for _ in range(2)]
    node_id = stage.node.node_id
    assert [session.session_id for session in registry.of_node(node_id)] == session_ids
    assert registry.of_node("0" * 26) == []
    registry.remove(registry.of_node(node_id)[0])
    assert [session.session_id for session in registry] == session_ids[1:]
    assert len(registry) == 1
