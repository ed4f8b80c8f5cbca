"""`relay kind`: the relay finds the documents of a package that was installed for it, and runs none of it."""

import json
import sys
from pathlib import Path

from tests.fakes.kind_package import KIND, wheel
from tests.fakes.relay_command import RelayCommand as Relay


def test_a_kind_that_was_installed_is_found_and_not_imported_and_gone_afterwards(
    relay: Relay, state: Path, tmp_path: Path
) -> None:
    absent = relay("config", "check", "--kinds", KIND)
    assert (absent.code, "no installed package" in absent.err) == (78, True)
    file = wheel(tmp_path, needs="Requires-Dist: acme-bus\n")
    assert relay("kind", "install", file, "--dry-run").code == 0
    assert not (state / "kinds").exists()
    installed = relay("kind", "install", file, "--json")
    assert [(each["name"], each["kinds"]) for each in json.loads(installed.out)] == [
        ("acme-relay-board", [KIND])
    ]
    assert "relay.toml" in installed.err
    assert relay("config", "check", "--kinds", KIND).code == 0
    assert not [name for name in sys.modules if name.startswith("acme_relay_board")]
    assert KIND in relay("kind", "list").out
    assert relay("kind", "uninstall", KIND).code == 0
    assert relay("config", "check", "--kinds", KIND).code == 78
    refused = relay("kind", "uninstall", KIND)
    assert (refused.code, "see `relay kind list`" in refused.err) == (3, True)
