"""Handlers of what arrives: one for each key, and any number of followers of an event.

Must not know what arrives, and must not do I/O: the owner of the followers logs the error of one.
"""

from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, TypeVar

KeyT = TypeVar("KeyT")
HandlerT = TypeVar("HandlerT")
EventP = ParamSpec("EventP")


class Handlers(Generic[KeyT, HandlerT]):
    """At most one handler for each key, such as a type of frame."""

    __slots__ = ("_handlers",)

    def __init__(self) -> None:
        self._handlers: dict[KeyT, HandlerT] = {}

    def add(self, key: KeyT, handler: HandlerT) -> None:
        """Have ``handler`` handle what arrives for ``key``.

        Raises:
            ValueError: the key has a handler.
        """
        if key in self._handlers:
            raise ValueError(f"{key} has a handler")
        self._handlers[key] = handler

    def get(self, key: KeyT) -> HandlerT | None:
        return self._handlers.get(key)


class Followers(Generic[EventP]):
    """Those that are called at each event, in the order in which they were added.

    An exception of one is given to ``failed`` with what it was called with, and the others are called all the
    same.
    """

    __slots__ = ("_failed", "_followers")

    def __init__(self, failed: Callable[Concatenate[Exception, EventP], None]) -> None:
        self._failed = failed
        self._followers: list[Callable[EventP, None]] = []

    def add(self, follower: Callable[EventP, None]) -> None:
        """Call ``follower`` at each event from now on. It must not block."""
        self._followers.append(follower)

    def notify(self, *event: EventP.args, **facts: EventP.kwargs) -> None:
        for follower in self._followers:
            try:
                follower(*event, **facts)
            except Exception as error:  # noqa: BLE001 - a bug of one must not keep the event from the others
                self._failed(error, *event, **facts)
