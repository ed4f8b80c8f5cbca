"""Enrols a node again, with a new key: after a revocation, or where its key may be known to others.

The identity that it has stays until the relay has issued another. Must not be imported by the running daemon.
"""

import shutil
from dataclasses import replace

from kubelet.identity.enrolment import Enroller, NotAdmittedError
from kubelet.identity.provisioning import Enrolled, create_identity
from kubelet.lock import held_alone
from schemas.identity_files import IdentityFiles

_BESIDE = "again"


async def enrol_again(enroller: Enroller) -> Enrolled:
    """Enrol the node of ``enroller`` with its own id if the relay gives that away again, else with a new one.

    Raises:
        EnrolmentError, ClockError, AddressError, IdentityFilesError, NoAnswerError: as ``Enroller.run``; the
            node has the identity that it had.
        OSError: a file of it cannot be used.
    """
    files = enroller.files
    own_id = files.read_node_id()
    with held_alone(files.root):
        try:
            enrolled = await _issued(enroller, own_id)
        except NotAdmittedError:
            # An id is refused before the token is spent: it is still good for a new node.
            enrolled = await _issued(enroller, None)
        _replace(files, IdentityFiles(files.root / _BESIDE))
    return enrolled


async def _issued(enroller: Enroller, node_id: str | None) -> Enrolled:
    beside = IdentityFiles(enroller.files.root / _BESIDE)
    shutil.rmtree(beside.root, ignore_errors=True)
    create_identity(beside, enroller.now_ms(), enroller.random_bytes, node_id)
    return await replace(enroller, files=beside).run()


def _replace(files: IdentityFiles, new: IdentityFiles) -> None:
    """Put what ``new`` has, also where it is enrolled, in the place of what ``files`` has; the key last."""
    files.server_roots.unlink(missing_ok=True)
    for file in sorted(new.root.iterdir(), key=lambda each: each.name == new.key.name):
        if file.name != "lock":
            file.replace(files.root / file.name)
    shutil.rmtree(new.root)
