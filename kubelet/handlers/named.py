"""The handlers of the kinds that the operator named: imported from their packages, and checked at start.

Their code runs with everything that this process may do, which is why only named ones are imported. Must not
announce a capability that a relay with the same packages would refuse.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from structlog.typing import FilteringBoundLogger

from kubelet.handlers.base import Handler, commands_per_s
from kubelet.handlers.own_thread import HandlerInThread
from schemas.contract import Contract
from schemas.delivery import MOST_COMMANDS_PER_S
from schemas.error_roots import ConfigError
from schemas.kinds import Kind
from schemas.registry import Validator
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
    for named in contract.named:
        if named.load_handler is None:
            continue
        handler, capability = _made(named.kind.name, named.load_handler, node_id, now_ms, log)
        if problem := _problem(capability, named.kind, admitted, taken):
            raise ConfigError([f"kinds: {named.kind.name}: the capability of its handler: {problem}"])
        taken.add(capability["cap_id"])
        handlers.append(HandlerInThread(handler, capability))
    if (announced := commands_per_s([*others, *handlers])) > MOST_COMMANDS_PER_S:
        raise ConfigError([_too_many(announced, handlers)])
    return handlers


def _too_many(announced: float, handlers: Sequence[Handler]) -> str:
    named = (handler.capability for handler in handlers)
    rates = ", ".join(f"{each['kind']} {each['constraints']['rate_limit_rps']:g}" for each in named)
    return (
        f"kinds: what this node announces is {announced:g} commands a second in all, and it can remember"
        f" {MOST_COMMANDS_PER_S} while a call lasts: lower rate_limit_rps, or name fewer kinds ({rates})"
    )


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
