"""What ``/readyz`` and ``relay status`` say of servers that cannot be used: in words, with what to change."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relay.cluster.reasons import reason_of, reason_of_end
from relay.settings.config import ClusterConfig
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import Member
from tests.fakes.cluster_server import NatsServer
from tests.fakes.polling import until
from tests.fakes.ports import unused_port

pytestmark = pytest.mark.integration

ALONE = "not connected; only this relay's own nodes can be called: "


class WithoutJetStream(NatsServer):
    """A server that passes messages on, and keeps none."""

    def config_text(self) -> str:
        """Return what it is configured with."""
        text = super().config_text()
        assert "jetstream {" in text
        return re.sub(r"jetstream \{.*?\n\}\n", "", text, flags=re.DOTALL)


@pytest.fixture
def keeps_nothing(tmp_path: Path) -> Iterator[NatsServer]:
    with WithoutJetStream.running(tmp_path) as server:
        yield server


async def shown(config: ClusterConfig, state: Path, registry: SchemaRegistry, text: str) -> str:
    """Return what a relay shows of the servers, once ``text`` is in it."""
    async with Member.joined(config, state, registry) as member:
        part = member.part
        await until(lambda: text in part.health()["cluster"].state)
        assert not part.health()["cluster"].ready
        return part.health()["cluster"].state


async def test_credentials_that_a_server_does_not_know(
    nats: NatsServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, registry: SchemaRegistry
) -> None:
    foreign = NatsServer(tmp_path_factory.mktemp("foreign")).credentials
    state = await shown(replace(nats.config, credentials=foreign), tmp_path / "relay", registry, "admit")
    assert state.startswith(f"{ALONE}the server does not admit what --cluster-credentials names")


async def test_a_fleet_of_which_the_credentials_are_not(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    other = replace(nats.config, fleet="north")
    states = {
        await shown(other, tmp_path / name, registry, "what relays of --cluster-fleet need")
        for name in ("one", "another")
    }
    (state,) = states  # nothing in it is of one connection alone, so it is logged once
    assert state.startswith(f"{ALONE}the server does not permit ")


async def test_a_server_without_jetstream(
    keeps_nothing: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    state = await shown(keeps_nothing.config, tmp_path / "relay", registry, "JetStream")
    assert state.startswith(f"connected to {keeps_nothing.url}: ")
    assert state.endswith("JetStream: enable it in the configuration of the servers")


async def test_what_the_system_and_tls_report_is_told_in_their_words_and_without_numbers(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    (server,) = nats.config.servers
    with_tls = replace(nats.config, servers=(replace(server, tls=True),))
    state = await shown(with_tls, tmp_path / "tls", registry, "TLS")
    assert state == f"{ALONE}what answers does not speak TLS"
    away = replace(nats.config, servers=(replace(server, port=unused_port()),))
    state = await shown(away, tmp_path / "away", registry, "refused")
    assert state == f"{ALONE}Connection refused"


async def test_what_was_sent_is_shown_escaped_and_cut() -> None:
    async def lost() -> str | None:
        return "\x1b" * 2000

    ended = asyncio.ensure_future(lost())
    await ended
    for reason in (reason_of(ValueError("\x1b" * 2000)), reason_of_end([ended])):
        assert reason.isprintable()
        assert len(reason) == 1024
    assert reason_of(TimeoutError()) == "no answer in time"
    assert reason_of(ValueError()) == "ValueError"
