"""Makes the handlers of a node: of each kind that ships by its module, of each other one by its package.

The module of a kind has its name, with underscores for dots. Must not run a handler.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from structlog.typing import FilteringBoundLogger

from kubelet.ceiling import Ceiling
from kubelet.handlers.base import NO_FILES, BuiltInHandler, Handler, OwnFiles
from kubelet.process import now_ms as system_ms
from schemas.registry import Contract, read_contract

if TYPE_CHECKING:
    from kubelet.handlers.base import HandlerFactory


class NodeHandlers(list[Handler]):
    """The handlers that work on this machine.

    Attributes:
        absent: why the others do not, by kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.absent: dict[str, str] = {}

    def state(self) -> dict[str, dict[str, Any]]:
        """Return what ``kubelet kinds`` and ``kubelet doctor`` show of each kind: whether it is announced."""
        shown = {kind: {"announced": False, "lacks": why} for kind, why in self.absent.items()}
        for handler in self:
            lacks = handler.lacks if isinstance(handler, BuiltInHandler) else None
            shown[handler.capability["kind"]] = {"announced": True, "lacks": lacks}
        return shown


def make_handlers(  # noqa: PLR0913 - what handlers are made of
    node_id: str,
    log: FilteringBoundLogger,
    contract: Contract | None = None,
    now_ms: Callable[[], int] = system_ms,
    *,
    own: OwnFiles = NO_FILES,
    ceiling: Ceiling | None = None,
) -> NodeHandlers:
    """Return a handler of each kind in ``contract``, by default of RFC-0001's, below ``ceiling``.

    Raises:
        ConfigError: the handler of a package cannot be used.
    """
    contract = contract or read_contract(())
    handlers, built_in = NodeHandlers(), list[BuiltInHandler]()
    for kind in sorted(contract.kinds, key=lambda kind: kind.name):
        if kind.capability is not None:
            module = import_module(f"{__package__}.{kind.name.replace('.', '_')}")
            factory: HandlerFactory = module.HANDLER
            handler = factory(kind.capability, node_id, now_ms, log)
            handler.own = own
            handler.ceiling = ceiling or handler.ceiling
            if handler.missing is None:
                built_in.append(handler)
            else:
                handlers.absent[kind.name] = handler.missing
                log.warning("kind not announced", kind=kind.name, reason=handler.missing)
    for handler in built_in:
        handler.announced = frozenset(each.capability["kind"] for each in built_in)
    handlers += built_in
    if any(each.load_handler is not None for each in contract.named):
        from kubelet.handlers.named import named_handlers  # noqa: PLC0415 - memory that few nodes need

        handlers += named_handlers(contract, handlers, node_id, now_ms, log)
    return handlers
