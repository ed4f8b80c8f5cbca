"""A relay's ``/enroll`` as the node sees it: correct by default, and wrong in the way that a test sets."""

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from typing import Any

from relay.pki.issuing import issue_leaf
from schemas.certificates import read_csr
from schemas.enrolment import NODE, RELAY, JoinToken, is_proven, proven
from schemas.identity import first_certificate_in
from schemas.kinds import shipped_names
from tests.fakes.raw_http_server import BOUND_S, Asked, RawServer, http_answer
from tests.fakes.signer import TENANT, SimulatedCa

JOIN_ID = "01HZX9K3M4P7Q8R9S0T1V2W3XY"


class EnrolmentServer:
    """Enrols each node that proves to have the key of its token.

    Attributes:
        overrides: members that the relay itself puts in place of the true ones, before it makes its proof.
        tamper: what a man in the middle does to the bytes of the answer.
        shown_roots: what ``GET`` answers.
        status: what is answered instead, if anything.
        headers: what goes with that.
        kinds: those that it knows.
        lost: how many answers get lost on the way.
        genuine: the requests whose proof holds.
    """

    def __init__(self, ca: SimulatedCa, now_ms: Callable[[], int]) -> None:
        self.ca = ca
        self.token = JoinToken(JOIN_ID, bytes(range(32)), sha256(first_certificate_in(ca.root_pem)).digest())
        self.overrides: dict[str, Any] = {}
        self.tamper: Callable[[dict[str, Any]], Any] = dict
        self.shown_roots = ca.root_pem
        self.status: int | None = None
        self.kinds: Sequence[str] = shipped_names()
        self.headers: dict[str, str] = {}
        self.lost = 0
        self.genuine: list[dict[str, Any]] = []
        self.server = RawServer("")
        self._now_ms = now_ms

    @asynccontextmanager
    async def open(self, tls: ssl.SSLContext | None = None) -> AsyncIterator["EnrolmentServer"]:
        async with RawServer.running(self._respond, tls) as self.server:
            yield self

    @contextmanager
    def open_in_thread(self) -> Iterator["EnrolmentServer"]:
        """Serve in a thread, for a test that runs a command line in this one."""
        opened, closing = threading.Event(), asyncio.Event()
        loop = asyncio.new_event_loop()

        async def serve() -> None:
            async with self.open():
                opened.set()
                await closing.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        try:
            assert opened.wait(BOUND_S)
            yield self
        finally:
            loop.call_soon_threadsafe(closing.set)
            thread.join(BOUND_S)
            loop.close()

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def methods(self) -> list[str]:
        """What was asked, in order."""
        return [asked.method for asked in self.server.asked]

    async def _respond(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.head.startswith("GET /schemas/ "):
            refs = [f"{kind}.snapshot.output@1.0.0" for kind in self.kinds]
            writer.write(http_answer(200, json.dumps({"schemas": refs}).encode("ascii")))
            return
        if asked.method == "GET":
            writer.write(http_answer(200, self.shown_roots.encode("ascii")))
            return
        answer = self._enrolled(json.loads(asked.body))
        if self.lost > 0:
            self.lost -= 1
        elif self.status is not None:
            writer.write(http_answer(self.status, b"whatever", **self.headers))
        else:
            writer.write(http_answer(200, json.dumps(answer).encode("ascii")))

    def _enrolled(self, request: dict[str, Any]) -> Any:
        if is_proven(request, self.token.key, NODE):
            self.genuine.append(request)
        node_id, public_key = read_csr(request["csr"])
        leaf = issue_leaf(
            self.ca.root_pem,
            self.ca.key,
            node_id=node_id,
            tenant=TENANT,
            public_key=public_key,
            now_ms=self._now_ms(),
            valid_days=90,
            serial=len(self.server.asked) + 1,
        )
        answer = {
            "certificate": leaf,
            "roots": self.ca.root_pem,
            "relay_url": self.url,
            "broker": "mqtt://127.0.0.1:1883",
            "own_root": False,
            "nonce": request["nonce"],
            "server_time_ms": self._now_ms(),
            **self.overrides,
        }
        return self.tamper(proven(answer, self.token.key, RELAY))
