"""A relay joins in the account of its fleet alone, and only as a user who may not make or change a stream."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relay.cluster.account import excess_right
from relay.cluster.credentials import new_nkey
from relay.cluster.server_config import administrator_permissions, relay_permissions
from schemas.files import PRIVATE, write_atomic
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import Member
from tests.fakes.cluster_server import FLEET, NatsServer
from tests.fakes.polling import until

ALLOWED = relay_permissions(FLEET)["publish"]["allow"]
OF_0_2 = {
    "publish": {
        "allow": [
            "edge.main.>",
            "$KV.edge_main_presence.>",
            *(
                f"$JS.API.{right}.{stream}"
                for stream in ("KV_edge_main_presence", "edge_main_ledger")
                for right in ("STREAM.INFO", "STREAM.CREATE", "STREAM.UPDATE", "CONSUMER.CREATE")
            ),
        ]
    },
    "subscribe": {"allow": ["edge.main.>"]},
}
"""What the configuration that shipped with version 0.2 permits a relay."""


def publishing(*allow: str, deny: Any = None, **more: Any) -> Any:
    return {"publish": {"allow": [*ALLOWED, *allow], "deny": deny}, **more}


@pytest.mark.parametrize(
    ("permissions", "right"),
    [
        (relay_permissions(FLEET), None),
        (None, "publish on every subject"),
        ("x", "publish on every subject"),
        ({"publish": None}, "publish on every subject"),
        ({"publish": {"allow": []}}, "publish on every subject"),
        ({"publish": {"allow": [5]}}, "publish on every subject"),
        ({"publish": {"allow": "edge.main.>"}}, "publish on every subject"),
        ({"publish": {"deny": ["$JS.API.STREAM.>"]}}, "publish on every subject"),
        (administrator_permissions(), "publish $JS.API.>"),
        (publishing(">"), "publish >"),
        (publishing("*.API.STREAM.UPDATE.x"), "publish *.API.STREAM.UPDATE.x"),
        (publishing("$JS.API.STREAM.*.x"), "publish $JS.API.STREAM.*.x"),
        (publishing("$JS.API.STREAM.CREATE.mine"), "publish $JS.API.STREAM.CREATE.mine"),
        (publishing("$JS.API.STREAM.MSG.DELETE.edge_main_ledger"), "publish $JS.API.STREAM.MSG.DELETE."),
        (publishing("$JS.API.STREAM.CREATE"), None),
        (publishing("$JS.API.STREAM.MSG.GET.edge_main_ledger"), None),
        (publishing("$JS.API.STREAM.CREATE.>", deny=["$JS.API.STREAM.CREATE.>"]), None),
        (publishing("$JS.API.STREAM.CREATE.>", deny=["$JS.API.*.*.>"]), None),
        (publishing("$JS.API.STREAM.CREATE.>", deny=["$JS.API.STREAM.CREATE.x"]), "publish $JS.API."),
        (publishing("$JS.API.STREAM.CREATE.>", deny=["$JS.API.STREAM.CREATE.*"]), "publish $JS.API."),
        (publishing("$JS.API.STREAM.CREATE.>", deny="$JS.API.STREAM.CREATE.>"), "publish $JS.API."),
        (publishing(responses={"max": 1}), "answer on every subject"),
    ],
)
def test_only_a_list_that_leaves_out_the_rights_of_an_administrator_is_a_relays(
    permissions: Any, right: str | None
) -> None:
    found = excess_right(permissions)
    assert found is None if right is None else (found or "").startswith(right)


async def problem_of(config: Any, state: Path, registry: SchemaRegistry) -> str:
    async with Member.joined(config, state, registry) as member:
        await until(lambda: member.part.connection.problem is not None)
        assert not member.part.health().ready
        assert member.part.health().lets_calls_flow
        return str(member.part.connection.problem)


@pytest.mark.integration
@pytest.mark.parametrize("account", ["$G", "north", "edge_main"])
async def test_a_user_of_another_account_or_with_more_rights_does_not_join(
    account: str, tmp_path: Path, registry: SchemaRegistry
) -> None:
    seed, key = new_nkey(os.urandom)
    write_atomic(tmp_path / "other.seed", seed, PRIVATE)
    user = {"nkey": key, "permissions": relay_permissions(FLEET)}
    users = f"users: [ {json.dumps(user)} ]"
    server = NatsServer(tmp_path, users=[{"nkey": key}])
    if account == "$G":
        server = NatsServer(tmp_path, f"authorization {{ {users} }}\n")
    elif account == "north":
        server = Beside(tmp_path, f"north: {{ jetstream: enabled, {users} }}")
    server.start()
    try:
        config = replace(server.config, credentials=tmp_path / "other.seed")
        problem = await problem_of(config, tmp_path / "relay", registry)
        async with Member.joined(server.config, tmp_path / "own", registry) as member:
            await until(lambda: member.part.health().ready)
    finally:
        server.stop()
    assert "`relay cluster init`" in problem
    expected = f"--cluster-credentials is a user of the account {account}, and not of edge_main, "
    if account == "edge_main":
        expected = "the user of --cluster-credentials may publish on every subject, which is for an "
    assert problem.startswith(expected)


class Beside(NatsServer):
    """One with another account, ``text``."""

    def __init__(self, directory: Path, text: str) -> None:
        super().__init__(directory)
        self._text = text

    def config_text(self) -> str:
        """Return the file that names the others."""
        return super().config_text().replace("accounts {", f"accounts {{\n  {self._text}")


@pytest.mark.integration
async def test_a_relay_with_the_configuration_of_0_2_does_not_join_and_is_told_what_to_run(
    tmp_path: Path, registry: SchemaRegistry
) -> None:
    seed, key = new_nkey(os.urandom)
    write_atomic(tmp_path / "former.seed", seed, PRIVATE)
    users = json.dumps([{"nkey": key, "permissions": OF_0_2}])
    with NatsServer.running(tmp_path, f"authorization {{ users: {users} }}\n") as nats:
        config = replace(nats.config, credentials=tmp_path / "former.seed")
        problem = await problem_of(config, tmp_path / "relay", registry)
    assert problem == (
        "the server does not say to relays of --cluster-fleet whose user they are: each fleet has an account "
        "of its own, here edge_main: `relay cluster init` makes it, see docs/cluster.md"
    )
