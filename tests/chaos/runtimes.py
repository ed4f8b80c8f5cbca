"""Agent runtimes that call nodes by remote tools, the guarded client, and what its audit recorded.

The tool counts as one that is not idempotent, of which a call is sent at most once. Must not judge.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

from relay.remote_tools import (
    AuditRecord,
    BearerToken,
    HttpServer,
    Permissions,
    Reason,
    RemoteToolError,
    RemoteTools,
    Risk,
    ToolRule,
)
from schemas.addresses import mcp_url
from tests.chaos import once_kind
from tests.chaos.callers import new_id, traced
from tests.chaos.history import NODE_LINK, Answer, Call, Fault, Recorded
from tests.chaos.journals import written
from tests.chaos.site import Site, now_ms

_DEADLINE_MS = 5000
_PERIOD_S = 0.3
_TOOLS = "sysecho.*"
UNSENT = "unsent"
"""The code of a call of which the client says that it did not run."""


class Runtime:
    """One client of the public URL of ``site``, which verifies the manifests of nodes by the root of the CA.

    Attributes:
        calls: what its caller saw.
        records: its audit.
        newest_ok_ms: when the newest call began that was answered with a result.
    """

    def __init__(self, site: Site, token: str, journal: Path) -> None:
        self.calls: list[Call] = []
        self.records: list[Recorded] = []
        self.newest_ok_ms = 0
        self._journal = journal
        self._is_stopped = False
        url, ca = mcp_url(site.public_url), site.plan.state.ca
        with once_kind.installed(site.packages):
            self._tools = RemoteTools(
                HttpServer(url, BearerToken(token), root=ca / "server-root.pem"),
                audit=self._audit,
                permissions=Permissions(allow=(_TOOLS,), scopes=None),
                rules=(ToolRule(_TOOLS, risk=Risk.READ, idempotent=False, deadline_s=_DEADLINE_MS / 1000),),
                verify_manifests=ca / "root.pem",
                kinds=site.kinds,
            )

    def stop(self) -> None:
        """Have it end after the call that it makes."""
        self._is_stopped = True

    def _audit(self, record: AuditRecord) -> None:
        # Of what ended before its first attempt there is one record, refused or not.
        event = record["event"].value if record["attempt"] else "refused"
        self.records.append(Recorded(record["correlation_id"], event))

    async def keep_calling(self, nodes: Sequence[str], chance: random.Random) -> None:
        """Call any node again and again, until told to stop."""
        async with self._tools:
            while not self._is_stopped:
                await self._call(chance.choice(nodes), new_id(chance))
                await asyncio.sleep(_PERIOD_S)

    async def _call(self, node_id: str, trace_id: str) -> None:
        began_ms = now_ms()
        answers: tuple[Answer, ...]
        is_given_up = False
        try:
            result = await self._tools.execute(
                f"sysecho.{node_id}.echo.invoke",
                {"message": trace_id},
                deadline_s=_DEADLINE_MS / 1000,
                correlation_id=trace_id,
                traceparent=traced(trace_id),
            )
            content = result.structured or {}
            answers = (Answer(trace_id, "ok", content.get("message"), content.get("node_id")),)
            self.newest_ok_ms = began_ms
        except RemoteToolError as error:
            answers, is_given_up = _answers(trace_id, error), error.reason is Reason.DEADLINE
        call = Call(
            trace_id, node_id, began_ms, now_ms(), answers, NODE_LINK, _DEADLINE_MS, is_given_up=is_given_up
        )
        self.calls.append(call)
        written(self._journal, asdict(call))


@asynccontextmanager
async def faults_logged() -> AsyncIterator[list[Fault]]:
    """Collect what the client logs meanwhile: exceptions that it did not expect."""
    logged = list[Fault]()

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info is not None:
                logged.append(Fault("remote tools", f"{record.getMessage()}: {record.exc_info[1]!r}"))

    logger, collector = logging.getLogger("relay.remote_tools"), Collector()
    logger.addHandler(collector)
    try:
        yield logged
    finally:
        logger.removeHandler(collector)


def _answers(trace_id: str, error: RemoteToolError) -> tuple[Answer, ...]:
    """Return the error as an answer; none if the client does not know whether the tool has run."""
    if isinstance(error.code, str):
        return (Answer(trace_id, error.code),)
    return () if error.may_have_run else (Answer(trace_id, UNSENT),)
