"""Adds the label of a node to the log lines that name it. Must not know where labels are kept."""

import logging
from collections.abc import Callable
from typing import Any

import structlog
from structlog.typing import EventDict, FilteringBoundLogger


def with_labels(log: FilteringBoundLogger, label_of: Callable[[str], str]) -> FilteringBoundLogger:
    """Return ``log`` with a field ``label`` beside each ``node_id`` of a node that has one."""

    def add_label(_logger: object, _method: str, line: EventDict) -> tuple[tuple[Any, ...], dict[str, Any]]:
        fields = dict(line)
        event, node_id = fields.pop("event"), fields.get("node_id")
        if isinstance(node_id, str) and (label := label_of(node_id)):
            fields.setdefault("label", label)
        # As arguments of the method of ``log``, which renders the line.
        return (event,), fields

    logger: FilteringBoundLogger = structlog.wrap_logger(
        log, processors=[add_label], wrapper_class=structlog.make_filtering_bound_logger(logging.INFO)
    )
    return logger
