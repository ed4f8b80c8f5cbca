"""The handlers of the kinds that the operator named."""

import io
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kubelet.daemon.composition import make_handlers
from schemas.contract import read_contract
from schemas.error_roots import ConfigError
from schemas.process.logs import make_logger
from tests.fakes.kind_package import HANDLER, KIND, KindPackage
from tests.fakes.signer import NODE_ID


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_relay_board"]:
        del sys.modules[name]


def refusal_of(handler: str, site: Path, log: io.StringIO | None = None) -> str:
    KindPackage(handler=handler).install(site)
    with pytest.raises(ConfigError) as caught:
        make_handlers(NODE_ID, make_logger("kubelet", log or io.StringIO()), read_contract((KIND,)))
    [problem] = caught.value.problems
    assert problem.startswith(f"kinds: {KIND}: ")
    return problem


async def test_a_named_kind_is_a_capability_of_the_node(site: Path) -> None:
    KindPackage().install(site)
    *_, handler = make_handlers(NODE_ID, make_logger("kubelet", io.StringIO()), read_contract((KIND,)))
    assert handler.capability["kind"] == KIND
    assert await handler.invoke("set", {"on": True}) == {"node_id": NODE_ID, "on": True, "label": "pump 1"}


def test_a_kind_that_is_not_named_is_not_imported(site: Path) -> None:
    KindPackage(handler="raise SystemError").install(site)
    names = [
        each.capability["kind"] for each in make_handlers(NODE_ID, make_logger("kubelet", io.StringIO()))
    ]
    assert KIND not in names


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"read_only"', '"reversible"', "/safety_class must"),
        ('"rate_limit_rps": 10', '"rate_limit_rps": 11', "/constraints/rate_limit_rps must"),
        ('["set"]', '["get"]', "/verbs/0 must"),
        ('"acme.relay_board"', '"system.echo"', "must"),
        ("set.input@1.0.0", "set.output@1.0.0", "kind and schema_ref must be those of kind.json"),
        ('"relays"', '"echo"', "another capability has the cap_id echo"),
        ("(Handler)", "", "makes no kubelet.handlers.base.Handler"),
    ],
)
def test_a_capability_that_the_relay_would_refuse_is_not_announced(
    site: Path, before: str, after: str, said: str
) -> None:
    assert before in HANDLER
    assert said in refusal_of(HANDLER.replace(before, after), site)


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        ("import smbus_that_is_not_there", "ModuleNotFoundError"),
        ("1 / 0", "ZeroDivisionError"),
        (HANDLER.replace("self._node_id = node_id", "open('/dev/absent')"), "FileNotFoundError"),
        (HANDLER.replace('"cap_id": "relays"', '"cap_id": self.absent'), "AttributeError"),
    ],
)
def test_a_handler_that_fails_at_start_leaves_its_traceback(site: Path, handler: str, error: str) -> None:
    log = io.StringIO()
    assert f"its handler fails with {error}: see the log" in refusal_of(handler, site, log)
    assert error in log.getvalue()
    assert "acme_relay_board/handler.py" in log.getvalue()


def test_kinds_that_announce_more_than_the_node_can_remember_are_refused_with_the_numbers(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    KindPackage().install(site)
    made = partial(make_handlers, NODE_ID, make_logger("kubelet", io.StringIO()), read_contract((KIND,)))
    # No more than a thousand a second are allowed to one kind; with echo and metrics there are 25 here.
    monkeypatch.setattr("kubelet.handlers.named.MOST_COMMANDS_PER_S", 25)
    assert len(made()) == 3
    monkeypatch.setattr("kubelet.handlers.named.MOST_COMMANDS_PER_S", 24)
    with pytest.raises(ConfigError) as caught:
        made()
    (problem,) = caught.value.problems
    assert problem == (
        "kinds: what this node announces is 25 commands a second in all, and it can remember 24 while a call"
        " lasts: lower rate_limit_rps, or name fewer kinds (acme.relay_board 10)"
    )
