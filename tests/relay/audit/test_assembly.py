"""The assembled audit."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from relay.audit.assembly import assemble
from relay.audit.log import AuditInUseError, AuditUnavailableError
from relay.audit.refusal_counts import RefusalEvent
from schemas.registry import SchemaRegistry
from tests.fakes.disk import full_disk
from tests.fakes.environment import FakeEnvironment, config, fake_environment


@pytest.fixture
def fake(tmp_path: Path, registry: SchemaRegistry) -> FakeEnvironment:
    return fake_environment(config(tmp_path), registry)


async def test_what_was_refused_is_written_at_the_end(fake: FakeEnvironment, tmp_path: Path) -> None:
    part = assemble(fake.environment)
    running = asyncio.create_task(part.run())
    await asyncio.sleep(0)  # it has begun
    part.refusals.count(RefusalEvent.NODE_REFUSED, "192.0.2.1", "chain")
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await part.close()
    assert '"node_refused"' in (tmp_path / "audit.jsonl").read_text("ascii")


async def test_calls_are_not_ready_while_they_cannot_be_recorded(fake: FakeEnvironment) -> None:
    part = assemble(fake.environment)
    assert part.health()["audit"].ready is True
    with full_disk(), pytest.raises(AuditUnavailableError):
        part.log.write(decision="allow")
    assert part.health()["audit"].ready is False
    part.log.write(decision="allow")
    assert part.health()["audit"].ready is True
    await part.close()


async def test_a_closed_audit_can_be_opened_by_another_relay(fake: FakeEnvironment) -> None:
    part = assemble(fake.environment)
    with pytest.raises(AuditInUseError):
        assemble(fake.environment)
    await part.close()
    await assemble(fake.environment).close()
