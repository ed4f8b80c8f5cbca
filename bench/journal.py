"""Writes a large journal, by a systemd-journald of its own in a mount namespace.

Must not touch this machine's journal.
"""

import os
import shutil
import subprocess
from pathlib import Path

_JOURNALD = Path("/usr/lib/systemd/systemd-journald")
_GIB = 2**30
_ENTRY_BYTES = 48 * 1024
_WRITE_S = 240
_SCRIPT = f"""
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/journald.conf.d /run/systemd/journal /run/log /var/log/journal
printf '[Journal]\\nStorage=persistent\\nCompress=no\\nRateLimitIntervalSec=0\\nSystemMaxUse=8G\\n\\
SystemKeepFree=0\\nSystemMaxFileSize=512M\\n' > /run/systemd/journald.conf.d/bench.conf
touch /run/systemd/journal/flushed
mount --bind "$1" /var/log/journal
{_JOURNALD} &
journald=$!
until test -S /run/systemd/journal/socket; do sleep 0.1; done
python3 - "$2" <<'END'
import socket, sys, time
message = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
message.connect("/run/systemd/journal/socket")
end, number = time.monotonic() + {_WRITE_S}, 0
while number < int(sys.argv[1]) // {_ENTRY_BYTES} and time.monotonic() < end:
    text = f"{{number:016}} " * ({_ENTRY_BYTES} // 17)
    message.send(f"MESSAGE={{text}}\\nPRIORITY=6\\nSYSLOG_IDENTIFIER=bench\\n".encode())
    number += 1
END
kill $journald
wait $journald || true
"""


def large_journal(directory: Path) -> int | None:
    """Write a journal of 4 GiB, or of half the free space, into ``directory``; return its size in bytes.

    None where this machine cannot: journald is missing, or this is not root.
    """
    if not _JOURNALD.exists() or os.getuid() != 0:
        return None
    size = min(4 * _GIB, shutil.disk_usage(directory).free // 2)
    command = ["unshare", "--mount", "sh", "-c", _SCRIPT, "sh", str(directory), str(size)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300)
    return sum(each.stat().st_blocks * 512 for each in directory.rglob("*.journal"))
