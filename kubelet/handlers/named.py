"""The handlers of the kinds that the operator named: imported from their packages, and checked at start.

Their code runs with everything that this process may do, which is why only named ones are imported. Must not
announce a capability that a relay with the same packages would refuse.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from structlog.typing import FilteringBoundLogger

from kubelet.handlers.base import Handler
from kubelet.handlers.verbs import commands_per_s
from schemas.delivery import MOST_COMMANDS_PER_S
from schemas.error_roots import ConfigError
from schemas.errors import Failure, ToolError
from schemas.frames import MAX_FRAME_BYTES
from schemas.kinds import Kind
from schemas.registry import Contract, Validator
from schemas.threads import NoThreadError, started
from schemas.violations import ViolationError

_CAPABILITY_REF = "capability@1.0.0"


def named_handlers(
    contract: Contract,
    others: Sequence[Handler],
    node_id: str,
    now_ms: Callable[[], int],
    log: FilteringBoundLogger,
) -> list[Handler]:
    """Return a handler of each kind of a package. ``others`` are those that the node has besides.

    What an entry point names is called with ``node_id`` and ``now_ms``, milliseconds since the epoch.

    Each has a thread of its own.

    Raises:
        ConfigError: it fails, or what it returns is no handler of its kind; the log has its traceback. Or all
            together announce more commands than a node can know.
        NoThreadError: the system has no thread left.
    """
    admitted = contract.registry.load(_CAPABILITY_REF)
    taken = {handler.capability["cap_id"] for handler in others}
    handlers: list[Handler] = []
    for each in contract.named:
        if each.load_handler is None:
            continue
        handler, capability = _made(each.kind.name, each.load_handler, node_id, now_ms, log)
        if problem := _problem(capability, each.kind, admitted, taken):
            raise ConfigError([f"kinds: {each.kind.name}: the capability of its handler: {problem}"])
        taken.add(capability["cap_id"])
        handlers.append(HandlerInThread(handler, capability))
    if (announced := commands_per_s([*others, *handlers])) > MOST_COMMANDS_PER_S:
        named = (handler.capability for handler in handlers)
        rates = ", ".join(f"{each['kind']} {each['constraints']['rate_limit_rps']:g}" for each in named)
        text = (
            f"kinds: what this node announces is {announced:g} commands a second in all, and it can remember"
            f" {MOST_COMMANDS_PER_S} while a call lasts: lower rate_limit_rps, or name fewer kinds ({rates})"
        )
        raise ConfigError([text])
    return handlers


def _made(
    name: str,
    load_handler: Callable[[], object],
    node_id: str,
    now_ms: Callable[[], int],
    log: FilteringBoundLogger,
) -> tuple[Handler, Mapping[str, Any]]:
    try:
        make: Any = load_handler()
        handler = make(node_id, now_ms)
        capability = handler.capability if isinstance(handler, Handler) else None
    except Exception as error:
        # Code that is not ours: any exception, and its text may hold anything.
        log.exception("handler not loaded", kind=name)
        cause = type(error).__name__
        raise ConfigError([f"kinds: {name}: its handler fails with {cause}: see the log"]) from error
    if capability is None:
        raise ConfigError([f"kinds: {name}: its entry point makes no kubelet.handlers.base.Handler"])
    return handler, capability


def _problem(capability: Mapping[str, Any], kind: Kind, admitted: Validator, taken: set[str]) -> str | None:
    try:
        admitted.check(capability)
    except ViolationError as error:
        return error.sentence
    if (capability["kind"], capability["schema_ref"]) != (kind.name, kind.schema_ref):
        return "kind and schema_ref must be those of kind.json"
    if capability["cap_id"] in taken:
        return f"another capability has the cap_id {capability['cap_id']}"
    return None


T = TypeVar("T")

MAX_BEHIND = 64
"""How many commands may wait for a thread that is blocked: those whose deadline has passed wait too."""
_RETRY_MS = 1_000


class HandlerInThread(Handler):
    """Runs ``handler``, whose ``capability`` it announces, in a thread that this starts.

    Raises:
        NoThreadError: the system has no thread left.
    """

    def __init__(
        self,
        handler: Handler,
        capability: Mapping[str, Any],
    ) -> None:
        self._handler = handler
        self._capability = capability
        self._submitted = self._reached = 0
        self._loop = asyncio.new_event_loop()
        # A daemon: code that never returns must not keep the process from ending.
        thread = threading.Thread(target=self._loop.run_forever, name=capability["cap_id"], daemon=True)
        try:
            started(thread)
        except NoThreadError:
            self._loop.close()
            raise

    @property
    def capability(self) -> Mapping[str, Any]:
        return self._capability

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the handler returns, as plain JSON.

        Raises:
            ToolError: RATE_LIMITED, if its thread does not get to the commands that it has.
            Exception: what the handler raises; ValueError or TypeError: its result is too large or no JSON.
        """
        if self._submitted - self._reached >= MAX_BEHIND:
            raise ToolError(Failure.RATE_LIMITED, "The handler is blocked.", retry_after_ms=_RETRY_MS)
        return await self._in_thread(partial(self._invoke, verb, arguments))

    async def run(self) -> None:
        await self._in_thread(self._handler.run)

    async def _in_thread(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        abandoned = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_contained(work, abandoned), self._loop)
        self._submitted += 1
        self._loop.call_soon_threadsafe(self._reach, self._submitted)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # What the thread has not begun must not begin: its deadline has passed.
            abandoned.set()
            raise

    def _reach(self, number: int) -> None:
        self._reached = number

    async def _invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        result = await self._handler.invoke(verb, arguments)
        if not isinstance(result, dict):
            raise TypeError("the result is no object")
        if _exceeds(result, MAX_FRAME_BYTES):
            raise ValueError(f"the result is larger than {MAX_FRAME_BYTES} bytes")
        # A copy: the handler may keep what it returned, and change it.
        plain: dict[str, Any] = json.loads(json.dumps(result, allow_nan=False))
        return plain


async def _contained(work: Callable[[], Coroutine[Any, Any, T]], abandoned: threading.Event) -> T:
    """Return what ``work`` returns; what would end the thread's event loop is an ordinary error.

    Raises:
        CancelledError: it is abandoned before it begins, or cancelled.
        RuntimeError: it would have ended the program, or cancelled itself.
        Exception: what ``work`` raises.
    """
    if abandoned.is_set():
        raise asyncio.CancelledError
    try:
        return await work()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("the handler has cancelled itself") from error
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError("the handler would end the program") from error


def _exceeds(value: object, limit: int) -> bool:
    """Return whether ``value`` takes more than ``limit`` bytes as JSON, without writing it.

    By no more steps than ``limit``: each value takes a byte at least.
    """
    size, pending = 0, [value]
    while pending and size <= limit:
        item = pending.pop()
        size += len(item) if isinstance(item, str | dict | list | tuple) else 1
        if size > limit:
            break
        if isinstance(item, dict):
            pending += (*item.keys(), *item.values())
        elif isinstance(item, list | tuple):
            pending += item
    return size > limit
