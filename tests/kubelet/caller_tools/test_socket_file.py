import os
import socket
import stat
from pathlib import Path

import pytest

from kubelet.caller_tools.socket_file import Peer, SocketFileError, bind_socket, peer_of
from schemas.files import MAX_SOCKET_PATH_BYTES

NO_GROUP = None


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_it_listens_and_is_gone_at_the_end(path: Path) -> None:
    with bind_socket(path, NO_GROUP), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert not path.exists()


def test_without_its_group_only_its_user_may_use_it(path: Path) -> None:
    with bind_socket(path, NO_GROUP) as made:
        assert made.group is None
        assert mode_of(path) == 0o600


def test_with_its_group_the_group_may(path: Path) -> None:
    group = os.getegid()
    with bind_socket(path, group) as made:
        assert made.group == group == path.lstat().st_gid
        assert mode_of(path) == 0o660


def test_a_stale_file_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with bind_socket(path, NO_GROUP), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_file_at_which_a_process_listens_is_not(path: Path) -> None:
    with bind_socket(path, NO_GROUP):
        with pytest.raises(SocketFileError, match="another process listens"), bind_socket(path, NO_GROUP):
            pass
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_what_is_no_socket_is_not_replaced(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(SocketFileError, match="is no socket"), bind_socket(path, NO_GROUP):
        pass
    assert path.read_text() == "precious"


def test_a_path_that_is_too_long_is_named_with_the_limit(tmp_path: Path) -> None:
    path = tmp_path / ("x" * MAX_SOCKET_PATH_BYTES)
    with (
        pytest.raises(SocketFileError, match=f"longer than {MAX_SOCKET_PATH_BYTES} bytes"),
        bind_socket(path, NO_GROUP),
    ):
        pass


def test_the_longest_path_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / ("x" * (MAX_SOCKET_PATH_BYTES - len(os.fsencode(tmp_path)) - 1))
    with bind_socket(path, NO_GROUP):
        assert path.exists()


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(SocketFileError, match="is no directory"),
        bind_socket(tmp_path / "no" / "no" / "s", NO_GROUP),
    ):
        pass


def test_its_own_directory_is_made_closed_to_others(tmp_path: Path) -> None:
    with bind_socket(tmp_path / "edge-kubelet" / "s", NO_GROUP):
        assert mode_of(tmp_path / "edge-kubelet") & 0o027 == 0


def test_a_directory_that_others_can_change_is_refused(path: Path) -> None:
    path.parent.chmod(0o777)
    with pytest.raises(SocketFileError, match="others can change"), bind_socket(path, NO_GROUP):
        pass


def test_a_file_that_another_daemon_has_put_there_is_left(path: Path) -> None:
    with bind_socket(path, NO_GROUP):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


US = os.geteuid()
STRANGER = US + 4711


def test_the_kernel_names_the_process_at_the_other_end() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        peer = peer_of(left)
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), US, os.getegid())
    assert peer.groups == set(os.getgroups())


@pytest.mark.parametrize(
    ("peer", "group", "may"),
    [
        (Peer(1, US, 1), None, True),
        (Peer(1, 0, 0), None, True),
        (Peer(1, STRANGER, 7), 7, True),
        (Peer(1, STRANGER, 1, frozenset({5, 7})), 7, True),
        (Peer(1, STRANGER, 1, frozenset({5})), 7, False),
        (Peer(1, STRANGER, 0), None, False),
        (Peer(1, STRANGER, 7), None, False),
    ],
)
def test_its_user_root_and_the_sockets_group_may_connect(peer: Peer, group: int | None, may: bool) -> None:  # noqa: FBT001 - a row
    assert peer.may_use(group) is may
