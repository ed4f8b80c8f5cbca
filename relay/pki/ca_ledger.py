"""The ledger of a CA, which is there wherever its root is: it is made with the CA, and never anew.

Must not know what is issued, and must not read a key.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from relay.pki.errors import AuthorityStateError
from relay.state.certificates import CaRecords
from relay.state.ledger import Ledger, LedgerError


class CaLedger(Ledger[CaRecords]):
    """The ledger of the CA in ``directory``. ``check_root`` raises where there is no root.

    Everything raises AuthorityStateError if the CA is missing, or a file of it is damaged. Locking waits for
    others: call it on a thread, not on the event loop.
    """

    def __init__(self, directory: Path, check_root: Callable[[], object]) -> None:
        super().__init__(directory / "ledger.jsonl", CaRecords())
        self._check_root = check_root

    def made(self) -> AbstractContextManager[CaRecords]:
        """Lock the ledger of a CA that is being made."""
        return super().locked()

    def read(self) -> CaRecords:
        """Return what it holds now."""
        self._check_there()
        try:
            return super().read()
        except LedgerError as error:
            raise AuthorityStateError(str(error)) from None

    @contextmanager
    def locked(self) -> Iterator[CaRecords]:
        """Lock it: two issues at once must not both find an id free."""
        self._check_there()
        try:
            with super().locked() as records:
                yield records
        except LedgerError as error:
            raise AuthorityStateError(str(error)) from None

    def _check_there(self) -> None:
        self._check_root()
        if not self.path.exists():
            # A new, empty one would hold no revocation.
            raise AuthorityStateError(f"{self.path} is missing: restore it from a backup")
