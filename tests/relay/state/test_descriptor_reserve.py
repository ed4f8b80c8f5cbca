import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relay.pki.authority import CertificateAuthority
from relay.state.tokens import RevokedTokens
from relay.state.watcher import DescriptorReserve
from tests.fakes.signer import NOW_MS

BOUND_S = 60

_EXHAUSTED = """
import os
import resource
import sys
from pathlib import Path
from relay.pki.authority import CertificateAuthority
from relay.state.watcher import DescriptorReserve
from relay.state.tokens import RevokedTokens

state = Path(sys.argv[1])
ca = CertificateAuthority(state / "ca", lambda: int(sys.argv[2]), os.urandom)
tokens = RevokedTokens(state / "revoked_tokens.jsonl")
reserve = DescriptorReserve()

def look():
    return len(ca.roots()), len(ca.revoked_kids()), sorted(tokens.jtis())

print(reserve.run(look), flush=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError as error:
    print(error.errno, flush=True)
for _ in sys.stdin:
    print(reserve.run(look), flush=True)
"""


@pytest.mark.integration
def test_what_is_revoked_or_rotated_is_read_when_connections_hold_all_descriptors(tmp_path: Path) -> None:
    operator = CertificateAuthority(tmp_path / "ca", lambda: NOW_MS, os.urandom)
    operator.create()
    (node_id, *_) = operator.issue_mock(1, tmp_path / "mock", "acme")
    command = [sys.executable, "-P", "-c", _EXHAUSTED, str(tmp_path), str(NOW_MS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def look() -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("look\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        try:
            assert process.stdout.readline().strip() == "(1, 0, [])"
            assert process.stdout.readline().strip() == str(errno.EMFILE)
            RevokedTokens(tmp_path / "revoked_tokens.jsonl").revoke("jti-1", now_ms=NOW_MS)
            assert look() == "(1, 0, ['jti-1'])"  # a file that was not there
            operator.revoke(node_id)
            RevokedTokens(tmp_path / "revoked_tokens.jsonl").revoke("jti-2", now_ms=NOW_MS)
            assert look() == "(1, 1, ['jti-1', 'jti-2'])"
            operator.rotate_root(1)
            assert look() == look() == "(2, 1, ['jti-1', 'jti-2'])"
            process.stdin.close()
            assert process.wait(BOUND_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_the_reserve_is_given_up_for_one_reading_and_taken_back(code: int) -> None:
    before = open_files()
    reserve = DescriptorReserve(3)
    free: list[int] = []

    def read() -> str:
        free.append(before + 3 - open_files())
        if not free[-1]:
            raise OSError(code, os.strerror(code))
        return "read"

    assert reserve.run(read) == "read"
    assert free == [0, 3]
    assert open_files() == before + 3
    reserve.close()
    assert open_files() == before


def test_another_error_is_not_tried_again() -> None:
    reserve, tries = DescriptorReserve(1), []

    def read() -> None:
        tries.append(1)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OSError, match="Input/output error"):
        reserve.run(read)
    assert len(tries) == 1
    reserve.close()


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
