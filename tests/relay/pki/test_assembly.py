"""The assembled certificate authority."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from relay.audit.assembly import AuditPart
from relay.audit.assembly import assemble as assemble_audit
from relay.broker.assembly import BrokerPart
from relay.pki.assembly import PkiPart, assemble, open_authority
from relay.pki.authority import CertificateAuthority
from relay.pki.errors import AuthorityStateError
from relay.state.names import NameLedger
from schemas.registry import SchemaRegistry
from tests.fakes.environment import FakeEnvironment, config, fake_environment


@pytest.fixture
def fake(tmp_path: Path, registry: SchemaRegistry) -> FakeEnvironment:
    wanted = fake_environment(config(tmp_path), registry)
    CertificateAuthority(tmp_path / "ca", wanted.clock, os.urandom).create()
    return wanted


@pytest.fixture
def audit(fake: FakeEnvironment) -> Iterator[AuditPart]:
    part = assemble_audit(fake.environment)
    yield part
    part.log.close()


def assembled(fake: FakeEnvironment, audit: AuditPart) -> PkiPart:
    names = NameLedger(fake.environment.config.state.node_names, fake.clock)
    return assemble(
        fake.environment, open_authority(fake.environment), audit, names.name_new, BrokerPart(None)
    )


def test_without_a_ca_the_error_says_what_to_do_first(tmp_path: Path, registry: SchemaRegistry) -> None:
    fake = fake_environment(config(tmp_path), registry)
    with pytest.raises(AuthorityStateError, match="relay ca init"):
        open_authority(fake.environment)


def test_what_the_broker_reads_lies_with_the_state_unless_the_operator_names_a_directory(
    fake: FakeEnvironment, audit: AuditPart, tmp_path: Path
) -> None:
    assert assembled(fake, audit).broker_access.refresh()
    assert (tmp_path / "broker" / "roots.pem").exists()
    elsewhere = tmp_path / "elsewhere"
    wanted = replace(fake.environment.config, broker_directory=elsewhere)
    part = assembled(replace(fake, environment=replace(fake.environment, config=wanted)), audit)
    assert part.broker_access.refresh()
    assert (elsewhere / "roots.pem").read_text() == part.authority.root_pem()


async def test_certificates_are_refreshed_until_cancelled(fake: FakeEnvironment, audit: AuditPart) -> None:
    part = assembled(fake, audit)
    running = asyncio.create_task(part.run())
    await asyncio.sleep(0)
    assert not running.done()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert running.cancelled()
