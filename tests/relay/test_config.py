from pathlib import Path

from relay.config import DEFAULT_LISTEN, DEFAULT_PUBLIC_URL, StateFiles, default_state_dir
from schemas.addresses import is_loopback, normal_url, parse_host_port


def test_all_state_lies_below_one_directory() -> None:
    root = Path("/var/lib/edge-relay")
    files = StateFiles(root)
    paths = [files.ca, files.token_key, files.marks, files.audit]
    assert {path.parent for path in paths} == {root}
    assert len(set(paths)) == 4


def test_state_lies_in_the_system_for_root_and_in_the_home_for_others() -> None:
    home = Path("/home/someone")
    assert default_state_dir(home, is_root=True) == Path("/var/lib/edge-relay")
    assert default_state_dir(home, is_root=False).is_relative_to(home)


def test_by_default_only_this_machine_can_reach_the_relay() -> None:
    address = parse_host_port(DEFAULT_LISTEN)
    assert is_loopback(address.host)
    assert normal_url(DEFAULT_PUBLIC_URL) == DEFAULT_PUBLIC_URL == f"http://{address}"
