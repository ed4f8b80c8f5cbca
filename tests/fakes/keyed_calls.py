"""A gateway to one node whose calls carry an idempotency key."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from relay.calls.executor import CallRequest
from relay.calls.idempotency import QUOTA_OF_ALL
from relay.calls.results import CallAnswer
from relay.routing.port import Command, LocalRouter
from relay.settings.config import EnvelopeMode
from schemas.kinds import KindRegistry
from schemas.payloads import CmdAck, ErrorEnvelope
from tests.fakes.callers import call_of
from tests.fakes.hub import Hub
from tests.fakes.seconds import Seconds
from tests.fakes.shipped_kinds import KINDS
from tests.fakes.signer import ECHO, METRICS, NODE_ID

ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
METRICS_NAME = f"sys.{NODE_ID}.sysmetrics.snapshot"
PING, PONG = {"message": "ping"}, {"message": "pong"}
BOUND_S = 30
CONSTRAINTS = {"rate_limit_rps": 50, "max_concurrency": 50}
WIDE_ECHO = {**ECHO, "constraints": CONSTRAINTS}
MAY_HAVE_RUN = "The first call under this key may have run; its outcome is not known."


def kinds(*, idempotent: bool) -> KindRegistry:
    """Return the kinds that ship; calling their tools again is said to be harmless, or not."""
    return KindRegistry(
        replace(
            kind,
            verbs={name: replace(verb, idempotent=idempotent) for name, verb in kind.verbs.items()},
        )
        for kind in KINDS
    )


class Stage:
    """A gateway whose tools are not idempotent, unless a test overrides it."""

    def __init__(  # noqa: PLR0913 - what a test may want to have otherwise
        self,
        hub: Hub,
        router: LocalRouter,
        seconds: Seconds,
        *,
        capability: Mapping[str, Any] = WIDE_ECHO,
        max_keys: int = QUOTA_OF_ALL.keys,
        mode: EnvelopeMode = EnvelopeMode.ENFORCE,
    ) -> None:
        self.hub = hub
        self.router = router
        self.seconds = seconds
        hub.connect(hub.ca.issue(), capabilities=[capability, METRICS, {**WIDE_ECHO, "cap_id": "echo2"}])
        self.gateway = hub.gateway(router, seconds, mode=mode, max_keys=max_keys)
        self.token = hub.token()

    def request(
        self, key: object = "k", arguments: object = PING, name: str = ECHO_NAME, token: str | None = None
    ) -> CallRequest:
        meta = {} if key is None else {"edge_kubelet__idempotency_key": key}
        return call_of(token or self.token, name, arguments, **meta)

    async def call(
        self, key: object = "k", arguments: object = PING, name: str = ECHO_NAME, token: str | None = None
    ) -> CallAnswer:
        return await self.gateway.call(self.request(key, arguments, name, token))

    def begin(self, key: object = "k", token: str | None = None) -> asyncio.Task[CallAnswer]:
        return asyncio.create_task(self.call(key, token=token))

    def jti(self, token: str) -> str:
        return self.hub.authenticator.identify(token).jti

    def decisions(self) -> list[tuple[Any, ...]]:
        """Return the audit: decision or outcome, code, and whether it says that it repeats the first call."""
        lines = self.hub.audited()
        assert {line["first"] for line in lines if "first" in line} <= {
            line["correlation_id"] for line in lines if "first" not in line
        }
        return [(line.get("decision") or line["outcome"], line["code"], "first" in line) for line in lines]

    def attempts(self) -> list[int]:
        return [line["attempt"] for line in self.hub.access_lines.entries()]


def code(answer: CallAnswer) -> str:
    return answer.error["code"] if answer.error else "ok"


def error_of(answer: CallAnswer) -> dict[str, Any]:
    """Return an error less what is each answer's own."""
    assert answer.error is not None
    return {name: value for name, value in answer.error.items() if name != "correlation_id"}


async def until_joined(stage: Stage, lines: int) -> None:
    """Wait until the audit has so many lines, which a call that joins writes before it waits."""
    async with asyncio.timeout(BOUND_S):
        while len(stage.hub.audited()) < lines:  # noqa: ASYNC110 - the audit is a file, without an event to await
            await asyncio.sleep(0)


def answering(envelope_code: str) -> Callable[[Command], CmdAck]:
    error: ErrorEnvelope = {"code": envelope_code, "message": "m", "suggested_fix": "f", "retry_after_ms": 7}
    return lambda _command: {"ok": False, "error": error}


def breaking(_command: Command) -> dict[str, Any]:
    raise ZeroDivisionError


async def hung_up(task: asyncio.Task[CallAnswer]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
