import os
import socket

import pytest

from kubelet.caller_tools.socket_file import Peer, peer_of

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
