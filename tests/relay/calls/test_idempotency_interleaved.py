"""Calls with idempotency keys in any interleaving, against a model."""

import asyncio
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from relay.calls.results import CallAnswer
from relay.routing.port import Command, CommandAnswer
from schemas.errors import Failure, ToolError
from schemas.registry import SchemaRegistry
from tests.fakes.examples import examples
from tests.fakes.hub import Hub
from tests.fakes.keyed_calls import Stage, answering, code, kinds
from tests.fakes.routers import HeldRouter, echoed
from tests.fakes.seconds import Seconds
from tests.fakes.signer import SimulatedCa

CA = SimulatedCa()
REGISTRY = SchemaRegistry()
HAS_NOT_RUN = {"offline": Failure.NODE_OFFLINE}
MAY_RUN = {"deadline": Failure.DEADLINE_EXCEEDED, "shut out": Failure.ATTESTATION_FAILED}
ENDINGS = ["ok", "fails", "busy", "gives up", "breaks", *HAS_NOT_RUN, *MAY_RUN]
Place = tuple[str, str]


@dataclass
class Known:
    """What the model knows of a key. ``state``: under way, known or unknown."""

    message: str
    opened: float
    state: str = "under way"
    outcome: str = ""


@dataclass
class Sent:
    """A command that the node has and has not answered."""

    place: Place
    jti: str
    command: Command
    answer: CommandAnswer


@dataclass
class Asked:
    """A call that waits, and what it waits for."""

    place: Place
    jti: str
    task: asyncio.Task[CallAnswer]


class OnceMachine(RuleBasedStateMachine):
    """Calls of two agents under two keys, against a model that is too simple to be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        self.hub = Hub(Path(self.directory.name), REGISTRY, ca=CA, kinds=kinds(idempotent=False))
        self.seconds, self.held = Seconds(), HeldRouter()
        self.stage = Stage(self.hub, self.held, self.seconds)
        self.model: dict[Place, Known] = {}
        self.sent: list[Sent] = []
        self.asked: list[Asked] = []

    def settle(self) -> None:
        """Let everything happen that can."""

        async def a_while() -> None:
            for _ in range(3):
                for _ in range(20):
                    await asyncio.sleep(0)
                self.hub.audit.flush()

        self.loop.run_until_complete(a_while())

    @rule(
        key=st.sampled_from("ab"),
        sub=st.sampled_from(["agent-1", "agent-2"]),
        message=st.sampled_from(["ping", "ping", "ping", "pong"]),
    )
    def call(self, key: str, sub: str, message: str) -> None:
        self.seconds.now += 0.1
        place, token = (sub, key), self.hub.token(sub=sub)
        known = self.model.get(place)
        if known and known.state != "under way" and known.opened + 600 <= self.seconds.now:
            known = None
        request = self.stage.request(key, {"message": message}, token=token)
        task = self.loop.create_task(self.stage.gateway.call(request))
        self.settle()
        jti = self.stage.jti(token)
        if known is None:
            self.model[place] = Known(message, self.seconds.now)
            command, answer = self.held.waiting.get_nowait()
            self.sent.append(Sent(place, jti, command, answer))
            self.asked.append(Asked(place, jti, task))
        elif known.message != message:
            assert code(task.result()) == "E_MANIFEST_INVALID"
        elif known.state == "under way":
            assert not task.done()
            self.asked.append(Asked(place, jti, task))
        else:
            expected = known.outcome if known.state == "known" else "E_DEADLINE_EXCEEDED"
            assert code(task.result()) == expected
        assert self.held.waiting.empty()

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), how=st.sampled_from(ENDINGS))
    def answer(self, data: st.DataObject, how: str) -> None:
        sent = self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))
        outcome = {"ok": "ok", "fails": "E_INTERNAL", "busy": "E_RATE_LIMITED", "breaks": "E_INTERNAL"}
        node_codes = {"fails": "E_INTERNAL", "busy": "E_RATE_LIMITED", "gives up": "E_DEADLINE_EXCEEDED"}
        if how == "ok":
            sent.answer.set_result(echoed(sent.command))
        elif how == "breaks":
            sent.answer.set_exception(ZeroDivisionError())
        elif how in node_codes:
            sent.answer.set_result(answering(node_codes[how])(sent.command))
        else:
            sent.answer.set_exception(ToolError((HAS_NOT_RUN | MAY_RUN)[how]))
        self.settle()
        known = self.model[sent.place]
        if how in {"busy", *HAS_NOT_RUN}:
            del self.model[sent.place]
        elif how in {"ok", "fails"}:
            known.state, known.outcome = "known", outcome[how]
        else:
            known.state = "unknown"
        waited = [asked for asked in self.asked if asked.place == sent.place]
        self.asked = [asked for asked in self.asked if asked.place != sent.place]
        answers = {code(asked.task.result()) for asked in waited}
        assert len(answers) <= 1
        if how in outcome:
            assert answers <= {outcome[how]}

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        asked = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        asked.task.cancel()
        self.settle()
        assert asked.task.cancelled()
        assert not any(sent.answer.cancelled() for sent in self.sent)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        asked = self.asked[data.draw(st.integers(0, len(self.asked) - 1))]
        self.stage.gateway.revoke({asked.jti})
        self.settle()
        assert code(asked.task.result()) == "E_SAFETY_DENIED"
        for sent in self.sent:
            assert sent.answer.cancelled() is (sent.jti == asked.jti)
            if sent.jti == asked.jti:
                self.model[sent.place].state = "unknown"
        self.sent = [sent for sent in self.sent if sent.jti != asked.jti]
        for other in self.asked:
            assert other.task.done() is (self.model[other.place].state != "under way" or other is asked)
        self.asked = [other for other in self.asked if not other.task.done()]

    @rule(seconds=st.sampled_from([1.0, 599.0, 600.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.seconds.now += seconds

    def teardown(self) -> None:
        self.loop.run_until_complete(self.hub.idempotent_calls.end())
        for asked in self.asked:
            with suppress(asyncio.CancelledError):
                self.loop.run_until_complete(asked.task)
        self.loop.close()
        self.hub.close()
        self.directory.cleanup()


@pytest.mark.holds("ENVELOPE/idempotency-key")
def test_no_interleaving_sends_a_command_twice_under_one_key_or_tells_what_is_not_so() -> None:
    run_state_machine_as_test(OnceMachine, settings=settings(examples(8, 60), stateful_step_count=40))
