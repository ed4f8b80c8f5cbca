"""A line that names a node has its label too."""

import pytest

from relay.observability.node_labels import with_labels
from schemas.process.logs import make_logger
from tests.fakes.lines import LogLines
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID


def test_the_label_is_beside_the_id_and_nowhere_else() -> None:
    lines = LogLines()
    log = with_labels(make_logger("relay", lines), {NODE_ID: "greenhouse pi"}.get)  # type: ignore[arg-type]  # None as well
    log.info("first", node_id=NODE_ID, tools=2)
    log.warning("second", node_id=OTHER_NODE_ID)
    log.error("third", kid="00")
    log.debug("not logged", node_id=NODE_ID)
    kept = [
        {name: line.get(name) for name in ("event", "level", "node_id", "label", "tools")}
        for line in lines.entries()
    ]
    assert kept == [
        {"event": "first", "level": "info", "node_id": NODE_ID, "label": "greenhouse pi", "tools": 2},
        {"event": "second", "level": "warning", "node_id": OTHER_NODE_ID, "label": None, "tools": None},
        {"event": "third", "level": "error", "node_id": None, "label": None, "tools": None},
    ]


@pytest.mark.parametrize("node_id", [7, None, ["x"]])
def test_an_id_that_is_no_text_has_no_label(node_id: object) -> None:
    lines = LogLines()
    with_labels(make_logger("relay", lines), lambda _: "pi").info("x", node_id=node_id)
    assert "label" not in lines.entries()[0]


def test_a_fault_keeps_its_traceback() -> None:
    lines = LogLines()
    log = with_labels(make_logger("relay", lines), lambda _: "pi")
    log.error("fault", node_id=NODE_ID, exc_info=ValueError("what happened"))
    [line] = lines.entries("fault")
    assert line["label"] == "pi"
    assert "ValueError" in line["exception"]
