"""``docs/maintainers/queues.md`` lists every place where something waits: compared with the code."""

import ast
import importlib
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kubelet.daemon.status import metrics_text
from relay.observability.metrics import Metrics

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "maintainers" / "queues.md"
HOLDERS = frozenset(
    {
        *("Queue", "LifoQueue", "PriorityQueue", "SimpleQueue", "deque"),
        *("Semaphore", "BoundedSemaphore", "ThreadPoolExecutor", "ProcessPoolExecutor"),
        *("to_thread", "run_in_executor", "create_task", "ensure_future"),
        *("start_server", "start_unix_server", "WatchedClient", "SendQueue"),
    }
)
# Common words, which hold something only in a module that imports what makes them do so.
HOLDERS_OF = {"listen": "socket", "Client": "paho"}
# Methods: the library of NATS queues what a subscription has not read.
METHODS_OF = {"subscribe": "nats", "watchall": "nats"}
BOUNDED_BY_POSITION = frozenset({"Queue", "LifoQueue", "PriorityQueue"})
BOUND_BY = {
    **{name: {"maxsize"} for name in BOUNDED_BY_POSITION},
    "subscribe": {"pending_msgs_limit", "pending_bytes_limit"},
    "watchall": set[str](),
}
POLICIES = ("refuse", "drop oldest", "drop newest", "close", "wait", "merge")
LOSSLESS = ("wait", "merge")

# No service: what these start ends with the command.
COMMANDS = ("relay/cli/demo/", "relay/cli/", "kubelet/cli/")
LOOPS = "a fixed number of loops, from the start to the end"
ENTRIES = "keeps the newest entries for readers; none of them waits for anything"
ONE = "one at a time, awaited by the loop that starts it"
EXEMPT = {
    "kubelet/announce/announcer.py": ("2 ensure_future", ONE),
    "kubelet/daemon/composition.py": ("create_task, to_thread", f"{LOOPS}; of the thread: once, at the end"),
    "kubelet/daemon/node.py": ("deque, 2 create_task", f"{LOOPS}; of the deque: it {ENTRIES}"),
    "kubelet/handlers/system_metrics.py": ("2 create_task", LOOPS),
    "kubelet/local_agent/daemon_client.py": ("create_task", ONE),
    "kubelet/local_agent/mcp_server.py": ("3 create_task", LOOPS),
    "kubelet/local_agent/agent_tools.py": ("create_task", LOOPS),
    "kubelet/process.py": ("create_task", LOOPS),
    "relay/auth/issuer_keys.py": ("create_task", "one fetch, which all that need its keys share"),
    "relay/broker/nats_server.py": ("3 listen", "finds a free port, accepts nothing; two are of a file"),
    "relay/broker/store.py": ("to_thread", ONE),
    "relay/broker/supervisor.py": (
        "deque, 5 to_thread, 3 create_task",
        f"{LOOPS}; {ONE}; the deque {ENTRIES}",
    ),
    "relay/cluster/cluster.py": ("2 create_task", LOOPS),
    "relay/cluster/client.py": (
        "ensure_future, subscribe",
        f"{LOOPS}; each message is handled as it is read",
    ),
    "relay/cluster/connection.py": ("2 ensure_future", LOOPS),
    "relay/cluster/fleet_identity.py": ("ensure_future", LOOPS),
    "relay/cluster/presence_bucket.py": ("4 create_task", LOOPS),
    "relay/fleet/node_index.py": ("deque", ENTRIES),
    "relay/pki/broker_access.py": ("to_thread", ONE),
    "relay/pki/enrolment_endpoint.py": ("to_thread", "reads the roots, for each connection that asks"),
    "relay/pki/relay_tls.py": ("3 to_thread", ONE),
    "relay/client/remote_tools/connection.py": (
        "3 create_task",
        "in the process of an agent, one connection",
    ),
    "relay/client/remote_tools/manifests.py": (
        "Semaphore",
        "in the process of an agent, the nodes of one answer",
    ),
    "relay/client/remote_tools/redaction.py": (
        "to_thread",
        "in the process of an agent, as a program ends",
    ),
    "relay/server/app.py": ("create_task", LOOPS),
    "relay/server/decisions.py": ("2 to_thread", ONE),
    "relay/server/serving.py": (
        "create_task, to_thread, 2 listen",
        f"{LOOPS}; of the thread: once, at the end; an address, and what relay.http.listener serves",
    ),
    "schemas/process/send_queue.py": ("create_task", "of a queue, listed where it is made"),
    "schemas/process/service_manager.py": ("to_thread", ONE),
    "relay/streams/telemetry/stream.py": ("deque", ENTRIES),
}
# Their rows, or exceptions, say what bounds them from outside.
UNBOUNDED = {
    "relay/audit/writer.py": Counter({"SimpleQueue": 1}),
    "relay/cluster/client.py": Counter({"subscribe": 1}),
    "relay/cluster/presence_bucket.py": Counter({"watchall": 1}),
    "relay/client/stdio_bridge/bridge.py": Counter({"SimpleQueue": 1}),
    "schemas/process/common_checks.py": Counter({"Queue": 4}),
}
UNCOUNTED = {
    "kubelet/local_agent/agent_tools.py",
    "kubelet/loopback.py",
    "relay/streams/caller_tools/tools.py",
    "relay/http/http_protocol.py",
    "relay/sessions/frame_handlers.py",
    "schemas/process/status_socket.py",
}


class Row(NamedTuple):
    module: str
    what: str
    held_by: str
    bound: str
    policy: str
    counter: str


def rows_of(text: str) -> list[Row]:
    lines = re.findall(r"^\| `(\S+\.py)` (\|.+)\|$", text, re.MULTILINE)
    return [Row(module, *(cell.strip() for cell in rest[1:].split("|"))) for module, rest in lines]


ROWS = rows_of(DOCUMENT.read_text("utf-8"))
rows = pytest.mark.parametrize("row", ROWS, ids=[f"{row.module}: {row.what}" for row in ROWS])


@cache
def sources() -> dict[str, str]:
    files = [file for package in ("kubelet", "relay", "schemas") for file in (ROOT / package).rglob("*.py")]
    named = {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in files}
    return {name: text for name, text in named.items() if not name.startswith(COMMANDS)}


def name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


@cache
def made_in(text: str) -> list[tuple[str, ast.Call | None]]:
    """Return what ``text`` constructs that holds something, with the call, if there is one."""
    # Most modules have none of the words, and to parse them all takes seconds.
    if not any(word in text for word in (*HOLDERS, *HOLDERS_OF, *METHODS_OF)):
        return []
    nodes = list(ast.walk(ast.parse(text)))
    imported = {
        (alias.name if isinstance(node, ast.Import) else node.module or "").partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    holders = HOLDERS | {name for name, module in HOLDERS_OF.items() if module in imported}
    methods = {name for name, module in METHODS_OF.items() if module in imported}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    handed_on = [
        value
        for call in calls
        for value in (*call.args, *(keyword.value for keyword in call.keywords))
        if isinstance(value, ast.Name | ast.Attribute) and name_of(value) in holders
    ]
    made = [
        (name, call)
        for call in calls
        if (name := name_of(call.func)) in holders
        or (name in methods and isinstance(call.func, ast.Attribute))
    ]
    return [*made, *((name_of(value), None) for value in handed_on)]


def held_in(text: str) -> Counter[str]:
    return Counter(name for name, _ in made_in(text))


def unbounded_in(text: str) -> Counter[str]:
    """Return the queues of ``text`` that nothing in their construction bounds."""
    return Counter(
        name
        for name, call in made_in(text)
        if name == "SimpleQueue" or (name in BOUND_BY and not (call and is_bounded(name, call)))
    )


def is_bounded(name: str, call: ast.Call) -> bool:
    named = {keyword.arg for keyword in call.keywords}
    return bool(named & BOUND_BY[name] or (name in BOUNDED_BY_POSITION and call.args))


def listed(words: str) -> Counter[str]:
    """Return what a cell, or an exception, lists: ``2 `to_thread`, `deque`, a dict``."""
    found: Counter[str] = Counter()
    for count, name in re.findall(r"(?:(\d+) )?`?(\w+)`?(?=,|$)", words):
        if name in {*HOLDERS, *HOLDERS_OF, *METHODS_OF}:
            found[name] += int(count or 1)
    return found


def documented() -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    exempt = ((module, words) for module, (words, _) in EXEMPT.items())
    for module, words in (*((row.module, row.held_by) for row in ROWS), *exempt):
        found[module] = found.get(module, Counter()) + listed(words)
    return found


def differences(held: dict[str, Counter[str]], known: dict[str, Counter[str]]) -> dict[str, str]:
    none: Counter[str] = Counter()
    return {
        module: f"in the code {dict(held.get(module, none))}, listed {dict(known.get(module, none))}"
        for module in held.keys() | known.keys()
        if held.get(module, none) != known.get(module, none)
    }


def constant(module: str, name: str) -> Any:
    """Return the constant ``name``, by its full name or of ``module``, a path."""
    dotted, _, last = name.rpartition(".")
    return getattr(importlib.import_module(dotted or module.removesuffix(".py").replace("/", ".")), last)


@cache
def metric_names() -> set[str]:
    node = metrics_text(
        {
            "version": "0",
            "uptime_s": 0,
            "ready": True,
            "subsystems": {},
            "certificate_expires_at_ms": 0,
            "manifest": {"expires_at_ms": 0},
            "relay": {"sessions": 0, "acknowledged_s_ago": None},
            "broker": {"relay_received": None, "published": []},
            "calls": {"outcomes": [], "in_flight": 0},
            "messages_refused": {"relay": 0, "broker": 0},
            "local_clients": {},
            **dict.fromkeys(
                (
                    "faults",
                    "log_lines_lost",
                    "resident_bytes",
                    "open_files",
                    "max_open_files",
                    "tasks",
                ),
                0,
            ),
        }
    )
    return set(re.findall(r"^# TYPE (\S+)", Metrics().render().decode() + node, re.MULTILINE))


def test_what_holds_something_that_waits_is_listed_and_what_is_listed_is_held() -> None:
    held = {name: found for name, text in sources().items() if (found := held_in(text))}
    known = {name: found for name, found in documented().items() if found}
    assert differences(held, known) == {}


def test_no_queue_is_without_a_bound() -> None:
    assert {name: found for name, text in sources().items() if (found := unbounded_in(text))} == UNBOUNDED


@pytest.mark.parametrize(
    "text",
    [
        "import asyncio\nwaiting = asyncio.Queue()",
        "import queue\nwaiting = queue.SimpleQueue()",
        "from dataclasses import field\nwaiting = field(default_factory=Queue)",
        "waiting: asyncio.Queue[str] = asyncio.Queue[str]()",
        "import nats\nwaiting = client.subscribe(subject, queue, cb=handle)",
    ],
)
def test_a_queue_without_a_bound_is_found(text: str) -> None:
    assert unbounded_in(text)
    assert differences({"relay/new.py": held_in(text)}, {})


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("import asyncio\nwaiting = asyncio.Queue(maxsize=1)", "Queue"),
        (
            "from nats.aio.client import Client\nwaiting = client.subscribe('x', pending_msgs_limit=1)",
            "subscribe",
        ),
    ],
)
def test_a_queue_with_a_bound_is_to_be_listed_and_no_more(text: str, held: str) -> None:
    assert not unbounded_in(text)
    assert held_in(text) == {held: 1}


@pytest.mark.parametrize(
    "text", ["import paho\nclient.subscribe('x')", "import nats\nsubscribe(client, 'x')"]
)
def test_what_is_called_like_a_subscription_of_nats_is_none(text: str) -> None:
    assert held_in(text) == {}


@rows
def test_a_row_names_what_exists(row: Row) -> None:
    assert (ROOT / row.module).is_file()
    constants = re.findall(r"`([\w.]+)`", row.bound)
    assert constants or row.bound.startswith("one "), "no bound"
    for name in constants:
        assert constant(row.module, name)
    assert row.policy.startswith(POLICIES)
    for name in re.findall(r"`(edge_\w+)`", row.counter):
        assert name in metric_names()


@rows
def test_what_can_be_lost_is_counted(row: Row) -> None:
    if row.policy in LOSSLESS:
        return
    if row.counter == "not counted":
        assert row.module in UNCOUNTED
        return
    seen = re.fullmatch(r"(log|audit) `([^`]+)`(?: in `(\S+)`)?", row.counter)
    if seen is None:
        assert re.match(r"`edge_\w+`", row.counter), row.counter
        return
    where = seen[3] or ("relay/audit/refusal_counts.py" if seen[1] == "audit" else row.module)
    assert f'"{seen[2]}"' in (ROOT / where).read_text("utf-8")


def test_the_exceptions_are_no_longer_than_they_must_be() -> None:
    assert {row.module for row in ROWS if row.counter == "not counted"} == UNCOUNTED
    assert all(reason for _, reason in EXEMPT.values())
