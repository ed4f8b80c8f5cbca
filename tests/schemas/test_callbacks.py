import pytest

from schemas.callbacks import Followers, Handlers


def test_a_key_has_one_handler_at_most() -> None:
    handlers = Handlers[str, int]()
    handlers.add("lease", 1)
    with pytest.raises(ValueError, match="lease has a handler"):
        handlers.add("lease", 2)
    assert handlers.get("lease") == 1
    assert handlers.get("sample") is None


def test_followers_are_called_in_order_and_the_error_of_one_keeps_the_event_from_no_other() -> None:
    called: list[str] = []
    failed: list[tuple[str, str]] = []

    def fails(_event: str) -> None:
        raise ZeroDivisionError("a bug")

    followers = Followers[[str]](lambda error, event: failed.append((str(error), event)))
    followers.add(lambda event: called.append(f"first {event}"))
    followers.add(fails)
    followers.add(lambda event: called.append(f"last {event}"))
    followers.notify("lost")
    assert called == ["first lost", "last lost"]
    assert failed == [("a bug", "lost")]


def test_what_is_no_error_of_a_follower_ends_the_event() -> None:
    followers = Followers[[]](lambda _error: pytest.fail("it is no bug"))

    def ends() -> None:
        raise KeyboardInterrupt

    followers.add(ends)
    with pytest.raises(KeyboardInterrupt):
        followers.notify()
