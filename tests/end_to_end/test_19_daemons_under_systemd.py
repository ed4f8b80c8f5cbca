"""19. The units as an operator starts them: systemd as PID 1, the sandbox, the limits and the watchdog.

Steps: install the services · start the relay, with its own broker, and the node · call · lend a tool to an
agent on the node · compare the metrics inside and outside of the sandbox · stop during a call · reload ·
crash · hang · break the configuration · purge. All in a root of its own.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.guide import snippets
from tests.fakes.kind_package import KIND, KindPackage, handler_doing, wheel
from tests.fakes.polling import wait_until
from tests.fakes.systemd_root import BOUND_S, SystemdRoot, SystemdRootError, running

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

PROGRAMS = snippets((Path(__file__).parents[2] / "docs/caller-tools.md").read_text("utf-8"))
CONFIG = 'public_url = "http://127.0.0.1:8700"\n'
KUBELET, RELAY = "edge-kubelet.service", "edge-relay.service"
AUDIT = "/var/lib/edge-relay/audit.jsonl"
PACKAGE = "acme-relay-board"
OPENED = "import os; os.open({place!r}, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY)"
DEVICES_HANDLER = handler_doing("""
    import errno, os
    def opened(place):
        try:
            os.close(os.open(place, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY))
        except OSError as error:
            return errno.errorcode[error.errno]
        return "opened"
    return {
        "node_id": self._node_id,
        "on": True,
        "label": "/".join(map(opened, ("/dev/ttyS0", "/dev/other"))),
    }
""")
OUTSIDE = """
import asyncio, json, sys
from kubelet.handlers.system_metrics import MetricsHandler
from schemas.process.logs import make_logger

async def snapshot():
    handler = MetricsHandler({}, "01" + "A" * 24, lambda: 0, make_logger("kubelet", sys.stderr))
    running = asyncio.create_task(handler.run())
    sample = await handler.invoke("snapshot", {})
    running.cancel()
    return sample

print(json.dumps(asyncio.run(snapshot())))
"""


@contextmanager
def started(work: Path) -> Iterator[SystemdRoot]:
    try:
        with running(work) as root:
            yield root
    except SystemdRootError as reason:
        pytest.skip(
            f"systemd cannot run here as PID 1, tests/test_units_by_bwrap.py is what is left: {reason}"
        )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SystemdRoot]:
    with started(tmp_path_factory.mktemp("systemd")) as root:
        yield root


def refused(root: SystemdRoot, *command: str) -> str:
    """Return what ``command`` prints, which fails."""
    process = root.begin(*command)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    return err


def stat(root: SystemdRoot, *files: str) -> set[str]:
    return set(root.run("stat", "--format=%U %G %a %n", *files).splitlines())


class Edge:
    """A relay with its own broker, and a node, under systemd; and an agent's token."""

    def __init__(self, root: SystemdRoot) -> None:
        self.root = root
        for program in ("relay", "kubelet"):
            root.run(program, "service", "install")
            sooner = f"/etc/systemd/system/edge-{program}.service.d/sooner.conf"
            root.write(sooner, "[Service]\nRestartSec=100ms\n")
        root.run("systemctl", "daemon-reload")
        root.write("/etc/edge-kubelet/relay.toml", CONFIG)
        # What a reboot does between the installation and the set-up.
        for unit in (RELAY, KUBELET):
            root.run("systemctl", "start", "--no-block", unit)
            # Its status is that of the newest process, which may run again already.
            wait_until(lambda: root.show(unit, "ExecMainStatus") + root.show(unit, "NRestarts") != "00", 60)  # noqa: B023 - it is called here alone
        root.run("systemctl", "stop", RELAY, KUBELET)
        root.run("relay", "ca", "init")
        root.run("systemctl", "start", RELAY)
        root.run("sh", "-c", "umask 077; relay join-token create > /root/join-token")
        root.run("kubelet", "enroll", "http://127.0.0.1:8700", "--token-file", "/root/join-token")
        root.run("systemctl", "start", KUBELET)
        self._token = root.run("relay", "token", "issue", "--sub", "ant").strip()
        root.until(KUBELET, "StatusText", "relay: announced")
        root.until(RELAY, "StatusText", "ready")
        self.node = json.loads(root.run("relay", "node", "list", "--json"))[0]["node_id"]

    def begin(self, tool: str, **arguments: Any) -> Any:
        """Begin a call by an agent."""
        name = tool.format(node=self.node)
        call = ("relay", "call", name, json.dumps(arguments), "--url", "http://127.0.0.1:8700/mcp")
        return self.root.begin("env", f"EDGE_TOKEN={self._token}", *call)

    def call(self, tool: str, **arguments: Any) -> Any:
        """Return what a call by an agent returns."""
        process = self.begin(tool, **arguments)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, out + err
        return json.loads(out)

    def follow(self, tool: str) -> Any:
        """Begin to follow what a tool samples, by ``FOLLOWER``."""
        told = ("http://127.0.0.1:8700/mcp", tool.format(node=self.node))
        return self.root.begin("env", f"EDGE_TOKEN={self._token}", "python3", "-P", "-c", FOLLOWER, *told)

    def refusal(self, tool: str, **arguments: Any) -> str:
        """Return what an agent reads whose call is refused."""
        process = self.begin(tool, **arguments)
        err: str = process.communicate(timeout=60)[1]
        assert process.returncode, "the call was made"
        return err

    @contextmanager
    def token_for(self, *kinds: str) -> Iterator[None]:
        """Call with a token that names ``kinds``."""
        before, options = self._token, [f"--kinds={kind}" for kind in kinds]
        self._token = self.root.run("relay", "token", "issue", "--sub", "ant", *options).strip()
        yield
        self._token = before

    def pid(self, unit: str) -> int:
        """Return the id that the process of the unit, which runs, has in the root."""
        self.root.until(unit, "ActiveState", "active")
        pid = int(self.root.show(unit, "MainPID"))
        assert pid > 1
        return pid

    def until_started_again(self, unit: str, before: int) -> None:
        """Wait until the unit runs as another process than ``before``."""
        wait_until(lambda: self.root.show(unit, "MainPID") not in {"0", str(before)}, 60)
        self.root.until(unit, "ActiveState", "active")


@pytest.fixture(scope="module")
def edge(root: SystemdRoot) -> Edge:
    return Edge(root)


def test_an_agents_call_reaches_the_node_and_both_say_what_they_do(edge: Edge) -> None:
    assert edge.call("sysecho.{node}.echo.invoke", message="hello")["message"] == "hello"
    for unit, limit in ((KUBELET, 128 << 20), (RELAY, 2 << 30)):
        assert edge.root.show(unit, "MemoryMax") == str(limit)
        assert edge.root.show(unit, "NRestarts") == "0"
        limits = edge.root.run("cat", f"/proc/{edge.pid(unit)}/limits")
        assert [line.split()[4] for line in limits.splitlines() if line.startswith("Max core")] == ["0"]


def test_a_member_of_the_group_lists_and_calls_what_a_caller_lends_and_another_user_does_not(
    edge: Edge,
) -> None:
    root = edge.root
    for name, text in PROGRAMS.items():
        root.write(f"/srv/{name}", text)
    for user, groups in (("ada", ("--groups", "edge-kubelet")), ("eve", ())):
        root.run("useradd", "--create-home", *groups, user)
    token = root.run("relay", "token", "issue", "--sub", "bee", "--scope", "sessions:message").strip()
    caller = root.begin(
        *("env", f"EDGE_TOKEN={token}", "python3", "-P", "/srv/caller.py"),
        *("http://127.0.0.1:8700/mcp", edge.node),
    )
    # MCP's client hands on no variable by which this root's interpreter finds its library.
    library = "LD_LIBRARY_PATH=/opt/edge-kubelet/base/lib"
    agent = ("python3", "-P", "/srv/agent.py", "env", library, "kubelet", "mcp")
    assert root.run("runuser", "-u", "ada", "--", *agent) == "They dance.\n"
    assert caller.communicate(timeout=60)[0].endswith("the node's agent says: Thank you.\n")
    stranger = root.begin("runuser", "-u", "eve", "--", "kubelet", "mcp")
    assert stranger.stderr is not None
    errors = stranger.stderr
    wait_until(lambda: "daemon not reached" in errors.readline(), 60)
    stranger.communicate(timeout=60)


def test_a_class_of_devices_is_allowed_and_no_more_than_that_class(edge: Edge) -> None:
    def may_open() -> list[str]:
        names = ("PrivateDevices", "DevicePolicy", "SupplementaryGroups")
        return [edge.root.show(KUBELET, name) for name in names]

    before = may_open()
    edge.root.run("sh", "-c", "getent group i2c || groupadd --system i2c")
    edge.root.run("kubelet", "kind", "allow-device", "i2c")
    edge.root.until(KUBELET, "ActiveState", "active")
    assert may_open() == ["no", "closed", "i2c"]
    assert "char-i2c rw" in edge.root.show(KUBELET, "DeviceAllow")
    edge.root.run("kubelet", "kind", "allow-device", "i2c", "--remove")
    assert may_open() == before
    edge.root.until(KUBELET, "StatusText", "relay: announced")


def test_a_kind_that_was_installed_opens_a_device_of_the_class_that_was_allowed_and_no_other(
    edge: Edge, tmp_path: Path
) -> None:
    root, package = edge.root, wheel(tmp_path, package=KindPackage(handler=DEVICES_HANDLER))
    for device, numbers, owner in (("ttyS0", "4 64", "root:dialout"), ("other", "10 229", "root:root")):
        root.run("sh", "-c", f"mknod -m 0666 /dev/{device} c {numbers} && chown {owner} /dev/{device}")
    probe = root.begin("python3", "-c", OPENED.format(place="/dev/ttyS0"))
    probe.communicate(timeout=60)
    if probe.returncode:
        pytest.skip("this machine has no serial port, which is the class that is allowed here")

    def opened() -> str:
        root.until(KUBELET, "StatusText", "relay: announced")
        label: str = edge.call("acmerb.{node}.relays.set", on=True)["label"]
        return label

    def restart(kinds: str) -> None:
        root.write("/etc/edge-kubelet/relay.toml", CONFIG + kinds)
        root.write("/etc/edge-kubelet/kubelet.toml", kinds)
        root.run("systemctl", "restart", RELAY, KUBELET)

    root.copy(package, "/srv")
    for program in ("relay", "kubelet"):
        root.run(program, "kind", "install", f"/srv/{package.name}")
    restart(f'kinds = ["{KIND}"]\n')
    try:
        assert opened() == "ENOENT/ENOENT"
        root.run("kubelet", "kind", "allow-device", "serial")
        assert opened() == "opened/EPERM"
        root.run("kubelet", "kind", "allow-device", "serial", "--remove")
        assert opened() == "ENOENT/ENOENT"
    finally:
        restart("")
    for program in ("relay", "kubelet"):
        root.run(program, "kind", "uninstall", KIND)
    root.until(KUBELET, "StatusText", "relay: announced")


LINUX = ("health", "units", "sensors", "network", "packages")
PRIVATE = ("journal", "processes", "files")
KINDS = tuple(f"linux.{each}" for each in (*LINUX, *PRIVATE))
DROP_INS = "/etc/systemd/system/edge-kubelet.service.d"
FILES = '["linux.files"]\ndirectories = ["/srv/logs", "!/srv/logs/private*"]\n'
"""What the board's owner lets be read in the story of all kinds."""
CEILING = """
["linux.health"]
units = ["!crashes*"]
["linux.sensors"]
sensors = ["!cpu-*"]
["linux.units"]
units = ["!crashes*"]
["linux.journal"]
units = ["edge-kubelet*"]
"""
BROKEN = {
    "crashes": (
        "[Service]\nType=oneshot\n"
        "ExecStart=/bin/sh -c 'echo cannot open the card, password=hunter2; exit 3'\n"
    ),
    "loops": (
        "[Unit]\nStartLimitIntervalSec=0\n[Service]\nExecStart=/bin/false\nRestart=always\nRestartSec=1s\n"
    ),
    "hungry": (
        "[Service]\nType=oneshot\nMemoryMax=16M\nMemorySwapMax=0\n"
        "ExecStart=/bin/sh -c 'echo sorting the archive; exec dd if=/dev/zero of=/dev/null bs=64M count=1'\n"
    ),
}
NO_CLOCK = (
    "[Service]\nSystemCallFilter=~adjtimex clock_adjtime clock_adjtime64\nSystemCallErrorNumber=EPERM\n"
)
"""Refuses what systemd asks the kernel by: then the clock is not synchronised, whatever it really is."""
OF_THE_KERNEL = "dmesg | grep 'Killed process' | tail --lines=1 | systemd-cat --identifier=kernel"
"""What journald does with it where it sees /dev/kmsg, which this root has not."""
ZONES = ("board-thermal", "cpu-thermal")
"""What the kernel measures in the story of all kinds, on whatever machine."""
FOLLOWER = """
import asyncio, json, os, sys
import httpx2
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client

async def follow(url, tool):
    seen = asyncio.Event()

    async def shown(_number, _total, message):
        sample = json.loads(message)
        print(sample["withheld"], *sorted(each["chip"] for each in sample["temperatures"]), flush=True)
        if sample["withheld"]:
            seen.set()

    headers = {"Authorization": "Bearer " + os.environ["EDGE_TOKEN"]}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60, trust_env=False) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        call = asyncio.create_task(client.call_tool(tool, {"interval_ms": 1000}, progress_callback=shown))
        await seen.wait()
        call.cancel()

asyncio.run(follow(*sys.argv[1:]))
"""
"""Follows a tool until a sample leaves something out; prints a line for each."""
WRONG = {
    ("unit_failed", "crashes.service"): "cannot open the card, password=[redacted]",
    ("unit_failed", "hungry.service"): "sorting the archive",
    ("unit_restarting", "loops.service"): "loops.service: Failed with result 'exit-code'.",
    ("process_killed_for_memory", None): "(dd)",
    ("clock_not_synchronised", None): "Network Time Synchronization",
    ("disk_nearly_full", "/srv/full"): None,
}
"""The findings, and what is in the log that is asked for next."""


def make_a_board_of_which_much_is_wrong(root: SystemdRoot) -> None:
    for name, text in BROKEN.items():
        root.write(f"/etc/systemd/system/{name}.service", text)
    root.write("/etc/systemd/system/systemd-timedated.service.d/clock.conf", NO_CLOCK)
    root.run("systemctl", "daemon-reload")
    root.run("systemctl", "start", "--no-block", *(f"{name}.service" for name in BROKEN))
    root.run("systemctl", "start", "systemd-timesyncd.service")  # which a container does without, and logs so
    root.run("sh", "-c", "mkdir /srv/full && mount -t tmpfs -o size=64k full /srv/full")
    root.run("sh", "-c", "head -c 64K /dev/zero > /srv/full/zeros")
    root.run("sh", "-c", "mkdir -p /srv/logs/private && echo started > /srv/logs/app.log")
    root.run("mount", "-t", "tmpfs", "zones", "/sys/class/thermal")
    for number, name in enumerate(ZONES):
        root.write(f"/sys/class/thermal/thermal_zone{number}/type", f"{name}\n")
        root.write(f"/sys/class/thermal/thermal_zone{number}/temp", "47200\n")


@pytest.mark.timeout(1200)  # it waits for restarts of both services, and of a unit in a loop
def test_what_is_wrong_with_a_board_is_one_call_and_the_finding_names_the_next(edge: Edge) -> None:
    root = edge.root
    make_a_board_of_which_much_is_wrong(root)
    shown = root.run("kubelet", "kinds", "enable", "linux.journal", "--dry-run").splitlines()
    assert shown[1:4] == [
        f"write {DROP_INS}/kind-linux.journal.conf",
        "    [Service]",
        "    SupplementaryGroups=systemd-journal",
    ]
    root.run("kubelet", "kinds", "enable", *KINDS)
    root.write("/etc/edge-kubelet/relay.toml", f"{CONFIG}kinds = {json.dumps(KINDS)}\n")
    root.write("/etc/edge-kubelet/kubelet.toml", FILES)
    root.run("systemctl", "restart", RELAY, KUBELET)
    wait_until(lambda: not {*KINDS} - announced(root), BOUND_S)
    assert doctor_of_kinds(root) == ("ok", "10 kinds", "")
    wait_until(lambda: int(root.show("loops.service", "NRestarts")) >= 3, BOUND_S)
    root.until("hungry.service", "ActiveState", "failed")
    root.run("sh", "-c", OF_THE_KERNEL)
    found = all_that_is_wrong(edge)
    failed = found["unit_failed", "crashes.service"]
    assert (failed["severity"], failed["evidence"]) == ("error", {"result": "exit-code"})
    ask = {"kind": "linux.units", "verb": "get", "unit": "crashes.service"}
    assert failed["ask"] == {**ask, "tool": f"units.{edge.node}.units.get"}
    unit = edge.call(failed["ask"]["tool"], unit=failed["ask"]["unit"])
    assert (unit["state"], unit["exit_status"]) == ("failed", 3)
    assert "log" not in unit  # its token does not name linux.journal
    killed = found["process_killed_for_memory", None]
    assert "ask" not in killed or killed["ask"] is None
    for name in LINUX:
        assert edge.call(f"{name}.{{node}}.{name}.snapshot")["node_id"] == edge.node
    journal = ("journal.{node}.journal.get", {"unit": "crashes.service", "search": "the card"})
    assert "lists no tool" in edge.refusal(journal[0], **journal[1])
    with edge.token_for("system.*", "linux.*", *(f"linux.{each}" for each in PRIVATE)):
        [line] = edge.call(journal[0], **journal[1])["lines"]
        assert line["text"] == "cannot open the card, password=[redacted]"
        the_log_of_each_finding_is_what_it_asks_for(edge)
        seen = edge.call("procs.{node}.processes.snapshot", by="memory")["processes"]
        assert {"relay", "systemd"} <= {each["name"] for each in seen}
        read = edge.call("files.{node}.files.get", path="/srv/logs/app.log")
        assert [each["text"] for each in read["lines"]] == ["started"]
        the_owner_limits_what_may_be_asked_for(edge)
    doctor_sees_what_the_sandbox_lets_the_daemon_see(edge)
    root.run("umount", "--lazy", "/srv/full", "/sys/class/thermal")
    root.run("systemctl", "stop", "loops.service")
    root.run("systemctl", "reset-failed")
    root.write("/etc/edge-kubelet/relay.toml", CONFIG)
    root.write("/etc/edge-kubelet/kubelet.toml", "")
    root.run("kubelet", "kinds", "disable", *KINDS)
    assert root.run("ls", DROP_INS).split() == ["sooner.conf"]
    root.run("systemctl", "restart", RELAY, KUBELET)
    root.until(KUBELET, "StatusText", "relay: announced")


def all_that_is_wrong(edge: Edge) -> dict[tuple[str, str | None], Any]:
    """Return the findings of one call, once it has all of ``WRONG``."""
    found: dict[tuple[str, str | None], Any] = {}

    def has_all() -> bool:
        answer = edge.call("health.{node}.health.snapshot")
        found.clear()
        found.update({(each["code"], each["subject"]): each for each in answer["findings"]})
        return found.keys() >= WRONG.keys()

    wait_until(has_all, BOUND_S)
    return found


def the_log_of_each_finding_is_what_it_asks_for(edge: Edge) -> None:
    """See the evidence of each finding, and its log with a token that names the journal."""
    found = all_that_is_wrong(edge)
    evidence = {key: found[key]["evidence"] for key in WRONG}
    # Of the kernel's two kinds of groups, systemd knows of one that a process was killed for its limit.
    assert evidence["unit_failed", "hungry.service"]["result"] in {"oom-kill", "signal"}
    assert evidence["unit_restarting", "loops.service"]["value"] >= 3
    assert evidence["process_killed_for_memory", None]["value"] >= 1
    assert evidence["clock_not_synchronised", None] == {"result": "inactive"}
    assert evidence["disk_nearly_full", "/srv/full"]["value"] == 100
    for key, text in WRONG.items():
        ask = found[key]["ask"]
        answer = edge.call(ask["tool"], **{name: ask[name] for name in ("unit", "search") if name in ask})
        if text is not None:
            lines = answer["log"] if "log" in answer else answer["lines"]
            assert any(text in each["text"] for each in lines), (key, lines)


def announced(root: SystemdRoot) -> set[str]:
    """Return the kinds that the daemon announces, and that see from within the sandbox what they show."""
    process = root.begin("kubelet", "status", "--json")
    status = json.loads(process.communicate(timeout=BOUND_S)[0] or "{}")
    kinds = status.get("kinds", {}) if status.get("ready") else {}
    return {name for name, said in kinds.items() if said["announced"] and said["lacks"] is None}


def doctor_of_kinds(root: SystemdRoot) -> tuple[str, str, str]:
    """Return how bad it is what doctor has found of the kinds, what that is, and what to do."""
    printed = root.begin("kubelet", "doctor", "--json").communicate(timeout=BOUND_S)[0]
    [row] = (row for row in map(json.loads, printed.splitlines()) if row["check"] == "kinds")
    return row["severity"], row["found"], row["fix"]


def doctor_sees_what_the_sandbox_lets_the_daemon_see(edge: Edge) -> None:
    """Take from the unit what a kind needs, and see that doctor, which root runs, says so."""
    root, drop_in = edge.root, f"{DROP_INS}/zz-fewer.conf"
    root.write(drop_in, "[Service]\nSupplementaryGroups=\n")
    root.run("systemctl", "daemon-reload")
    root.run("systemctl", "restart", KUBELET)
    lacks = "10 kinds; linux.journal: no journal can be read: that takes the group systemd-journal"
    expected = ("warning", lacks, "sudo kubelet kinds enable linux.journal")
    wait_until(lambda: doctor_of_kinds(root) == expected, 2 * BOUND_S)
    root.run("rm", drop_in)
    root.run("systemctl", "daemon-reload")


def the_owner_limits_what_may_be_asked_for(edge: Edge) -> None:
    """See that a table of the board's owner holds at once, for a token that names every kind."""
    root, cursor = edge.root, edge.call("journal.{node}.journal.get", lines=1)["next"]
    following = edge.follow("sensors.{node}.sensors.subscribe")
    assert following.stdout.readline().split() == ["0", *ZONES]
    root.write("/etc/edge-kubelet/kubelet.toml", FILES + CEILING)
    root.run("systemctl", "reload", KUBELET)
    wait_until(lambda: '"setting": "linux.journal"' in root.log(KUBELET), BOUND_S)
    # The stream goes on, and leaves out what is denied; FOLLOWER ends with the first such sample.
    out, err = following.communicate(timeout=BOUND_S)
    *before, last = out.splitlines()
    assert {each.removeprefix("0 ") for each in before} <= {" ".join(ZONES)}, err
    assert last.split() == ["1", "board-thermal"]
    denied = "The board's owner does not allow this; no token changes that."
    for tool, arguments in (
        ("units.{node}.units.get", {"unit": "crashes.service"}),
        ("units.{node}.units.get", {"unit": "crashes-none.service"}),
        ("journal.{node}.journal.get", {"unit": "crashes.service"}),
        ("journal.{node}.journal.get", {"unit": "none.service"}),
        ("files.{node}.files.get", {"path": "/srv/logs/private/none"}),
        ("files.{node}.files.get", {"path": "/etc/passwd"}),
    ):
        assert denied in edge.refusal(tool, **arguments), (tool, arguments)
    listed = edge.call("units.{node}.units.snapshot", pattern="crashes*")
    assert (listed["total"], listed["withheld"]) == (0, 1)
    for search in ({"search": "the card"}, {"search": "nothing at all"}, {"cursor": cursor, "lines": 500}):
        found = edge.call("journal.{node}.journal.get", **search)
        assert {each["unit"] for each in found["lines"]} <= {"edge-kubelet.service"}
        assert found["withheld"] > 1
    health = edge.call("health.{node}.health.snapshot")
    assert health["withheld"] == 1
    assert "crashes.service" not in {each["subject"] for each in health["findings"]}
    outcomes = root.run("grep", "-c", '"outcome":"denied_by_owner","code":"E_SAFETY_DENIED"', AUDIT)
    assert int(outcomes) == 6
    log = root.log(KUBELET)
    assert log.count("outside the ceiling") == 6
    assert "crashes-none" not in log
    assert "not crashes*" in root.run("kubelet", "kinds", "show", "linux.units")
    root.write("/etc/edge-kubelet/kubelet.toml", FILES + '["linux.journal"]\nunits = 1\n')
    root.run("systemctl", "reload", KUBELET)
    wait_until(lambda: "settings not reloaded" in root.log(KUBELET), BOUND_S)
    assert denied in edge.refusal("units.{node}.units.get", unit="crashes.service")
    root.write("/etc/edge-kubelet/kubelet.toml", FILES)


def test_what_root_makes_is_the_services_own_and_what_root_names_is_roots(edge: Edge) -> None:
    root, state = edge.root, "/var/lib/edge-relay"
    files = [f"{state}/{name}" for name in ("ca", "ca/root.key", "token.key", "issued_tokens.jsonl")]
    relay = "edge-relay edge-relay"
    modes = zip(("750", "600", "600", "640"), files, strict=True)
    assert stat(root, *files) == {f"{relay} {mode} {file}" for mode, file in modes}
    root.run("sh", "-c", "cd /root && relay ca backup relay.age --plain")
    root.run("sh", "-c", "cd /root && relay ca issue-server mqtt.example --out broker-tls")
    made = stat(root, "/root/relay.age", "/root/broker-tls/server.key")
    assert made == {"root root 600 /root/relay.age", "root root 600 /root/broker-tls/server.key"}
    for command in (("relay", "doctor"), ("relay", "status"), ("kubelet", "status"), ("kubelet", "doctor")):
        root.begin(*command).communicate(timeout=60)
    assert root.run("find", state, "/var/lib/edge-kubelet", "-user", "root") == ""


def succeeds(root: SystemdRoot, *command: str) -> bool:
    process = root.begin(*command)
    process.communicate(timeout=BOUND_S)
    return process.returncode == 0


def test_a_member_of_the_services_group_sees_what_is_no_secret(edge: Edge) -> None:
    root = edge.root
    root.run("useradd", "--create-home", "--groups", "edge-relay,edge-kubelet", "mel")
    as_mel = ("runuser", "-u", "mel", "--")
    for command in (
        *("relay status", "relay node list", "relay ca list", "relay ca roots", "relay token list"),
        *("relay audit tail", "relay config show", "kubelet status", "kubelet config show"),
    ):
        assert root.run(*as_mel, *command.split())
    for command in ("relay token issue --sub mel", "relay join-token list", "relay ca revoke " + edge.node):
        said = refused(root, *as_mel, *command.split())
        assert "Permission denied: its group sees what is no secret" in said, command
        assert "run this as root, with sudo" in said
    skipped = {"relay": "", "kubelet": "skipped  broker       not checked: /var/lib/edge-kubelet/node.key"}
    for program, line in skipped.items():
        # A daemon that was just started again has announced what the relay may not have received yet.
        wait_until(partial(succeeds, root, *as_mel, program, "doctor", "--strict"), BOUND_S)
        checks = root.run(*as_mel, program, "doctor").splitlines()
        assert {each.split()[0] for each in checks} == {"ok", *line.split()[:1]}, checks
        assert any(each.startswith(line) for each in checks)


def test_what_is_restored_is_the_services_and_shows_its_group_the_same(edge: Edge) -> None:
    root, state = edge.root, "/var/lib/edge-relay"
    files = [f"{state}/{name}" for name in ("", "ca", "ca/ledger.jsonl", "ca/root.key", "join_tokens.jsonl")]
    root.run("sh", "-c", "umask 077; relay ca backup /root/moved.age --plain")
    root.run("systemctl", "stop", RELAY)
    before = stat(root, *files)
    root.run("mv", state, "/var/lib/earlier")
    root.run("install", "--directory", "--mode=0750", "--owner=edge-relay", "--group=edge-relay", state)
    root.run("relay", "ca", "restore", "/root/moved.age", "--plain")
    after = stat(root, *files)
    root.run("sh", "-c", f"rm -r {state} && mv /var/lib/earlier {state}")
    root.run("systemctl", "start", RELAY)
    root.until(RELAY, "StatusText", "ready")
    root.until(KUBELET, "StatusText", "relay: announced")  # after half a minute, if it was away for long
    assert after == before


def test_a_second_ca_is_refused_and_both_places_are_named(edge: Edge) -> None:
    root = edge.root
    root.run("useradd", "--create-home", "sue")
    own = "/home/sue/.local/state/edge-relay"
    said = refused(root, "runuser", "-u", "sue", "--", "env", "HOME=/home/sue", "relay", "ca", "init")
    assert "/var/lib/edge-relay" in said
    assert own in said
    for command in (("relay",), ("runuser", "-u", "edge-relay", "--", "relay")):
        assert "/var/lib/edge-relay/ca" in refused(root, *command, "ca", "init")
    assert root.run("find", "/home", "/root", "/var/lib", "-name", "root.key") == (
        "/var/lib/edge-relay/ca/root.key\n"
    )


def test_metrics_inside_the_sandbox_are_those_outside_of_it(edge: Edge) -> None:
    inside = edge.call("sys.{node}.sysmetrics.snapshot")
    outside = json.loads(edge.root.run("runuser", "-u", "edge-kubelet", "--", "python3", "-P", "-c", OUTSIDE))
    assert inside["cpu"]["cores"] == outside["cpu"]["cores"]
    for name in ("total_bytes", "swap_total_bytes"):
        assert inside["mem"][name] == outside["mem"][name]
    assert abs(inside["uptime_s"] - outside["uptime_s"]) < 120
    assert abs(inside["load"]["fifteen"] - outside["load"]["fifteen"]) < 5
    assert outside["disk"]
    assert [stable(disk) for disk in inside["disk"]] == [stable(disk) for disk in outside["disk"]]


def stable(disk: dict[str, Any]) -> tuple[Any, ...]:
    """Return what of a disk does not change from one sample to the next."""
    return disk["mount"], disk["fs_type"], disk["total_bytes"]


# The node must not be frozen for longer than the call may take: one process does all of it.
STOP_DURING_A_CALL = """
allowed() { grep '"sub":"ant"' /var/lib/edge-relay/audit.jsonl | grep -c '"decision":"allow"'; }
until [ "$(allowed)" -gt "$2" ]; do :; done
systemctl stop --no-block edge-relay
until systemctl show --value --property=StatusText edge-relay | grep -q ^stopping; do :; done
kill -CONT $1
"""


def test_a_stop_answers_the_call_in_flight_and_is_no_failure(edge: Edge) -> None:
    node = str(edge.pid(KUBELET))
    lines = edge.root.run("cat", "/var/lib/edge-relay/audit.jsonl").splitlines()
    before = sum('"sub":"ant"' in line and '"decision":"allow"' in line for line in lines)
    edge.root.run("kill", "-STOP", node)
    process = edge.begin("sysecho.{node}.echo.invoke", message="in flight")
    edge.root.run("sh", "-c", STOP_DURING_A_CALL, "sh", node, str(before))
    out, err = process.communicate(timeout=60)
    edge.root.until(RELAY, "ActiveState", "inactive")
    stopped = edge.root.show(RELAY, "Result")
    edge.root.run("systemctl", "restart", KUBELET, RELAY)
    assert json.loads(out or "{}").get("message") == "in flight", err
    assert (stopped, edge.root.show(KUBELET, "Result")) == ("success", "success")


def test_a_reload_reads_the_settings_again_and_the_process_goes_on(edge: Edge) -> None:
    before = edge.pid(RELAY)
    edge.root.write("/etc/edge-kubelet/relay.toml", CONFIG + "agent_rps = 100\n")
    edge.root.run("systemctl", "reload", RELAY)
    wait_until(lambda: "settings read again" in edge.root.log(RELAY), 60)
    assert edge.pid(RELAY) == before
    edge.root.write("/etc/edge-kubelet/relay.toml", CONFIG)


@pytest.mark.parametrize("unit", [KUBELET, RELAY])
def test_a_process_that_is_killed_is_started_again(edge: Edge, unit: str) -> None:
    before = edge.pid(unit)
    edge.root.run("kill", "-KILL", str(before))
    edge.until_started_again(unit, before)


@pytest.mark.parametrize("unit", [KUBELET, RELAY])
def test_a_process_that_hangs_is_ended_by_the_watchdog_and_started_again(edge: Edge, unit: str) -> None:
    # As in the unit, but sooner.
    edge.root.write(
        f"/etc/systemd/system/{unit}.d/watchdog.conf", "[Service]\nWatchdogSec=3\nTimeoutAbortSec=1\n"
    )
    edge.root.run("systemctl", "daemon-reload")
    edge.root.run("systemctl", "restart", unit)
    before = edge.pid(unit)
    edge.root.run("kill", "-STOP", str(before))
    edge.until_started_again(unit, before)
    assert f"{unit}: Watchdog timeout" in edge.root.log(unit)


def test_settings_that_cannot_be_used_stop_the_unit_and_a_start_after_that_works(edge: Edge) -> None:
    edge.root.write("/etc/edge-kubelet/relay.toml", CONFIG + 'lisen = "127.0.0.1:8700"\n')
    edge.root.run("sh", "-c", f"systemctl restart {RELAY} || true")
    edge.root.until(RELAY, "ActiveState", "failed")
    assert edge.root.show(RELAY, "ExecMainStatus") == "78"
    assert "listen" in edge.root.log(RELAY)
    edge.root.write("/etc/edge-kubelet/relay.toml", CONFIG)
    edge.root.run("systemctl", "start", RELAY)
    edge.root.until(RELAY, "ActiveState", "active")


def tried(root: SystemdRoot, package: Path) -> str:
    """Return the state directory of a relay that ada has tried, with an address and a kind of its own."""
    state = "/home/ada/.local/state/edge-relay"
    root.run("useradd", "--create-home", "ada")
    as_ada = ("runuser", "-u", "ada", "--", "env", "HOME=/home/ada", "relay")
    root.run(*as_ada, "ca", "init")
    root.copy(package, "/srv")
    root.run(*as_ada, "kind", "install", f"/srv/{package.name}")
    # Its process is one in the root, of which nsenter alone is a child here.
    line = f"{' '.join(as_ada)} run --no-broker --listen 127.0.0.1:8711 --kinds {KIND} & echo $!; wait"
    running = root.begin("sh", "-c", line)
    assert running.stdout is not None
    pid = running.stdout.readline().strip()
    wait_until(lambda: "status.sock" in root.run("ls", state), 60)
    assert "stop it first" in refused(root, "relay", "service", "install", "--from", state)
    root.run("pkill", "--parent", pid)
    running.communicate(timeout=60)
    return state


def test_what_was_installed_is_removed_and_a_purge_leaves_nothing(tmp_path: Path) -> None:
    # A root of its own: what is removed here must not be missing to another test.
    with started(tmp_path) as root:
        state = tried(root, wheel(tmp_path))
        key = root.run("sha256sum", f"{state}/ca/root.key").split()[0]
        root.run("kubelet", "service", "install")
        shown = root.run("relay", "service", "install", "--from", state, "--dry-run")
        kinds = "/etc/edge-kubelet/relay-kinds"
        for moved, there in (
            (state, "/var/lib/edge-relay"),
            (f"{state}/kinds/{PACKAGE}", f"{kinds}/{PACKAGE}"),
        ):
            assert f"run mv --no-target-directory {moved} {there}" in shown.splitlines()
        root.run("relay", "service", "install", "--from", state)
        assert root.run("sha256sum", "/var/lib/edge-relay/ca/root.key").split()[0] == key
        assert root.run("ls", "/home/ada/.local/state") == ""
        assert "in use" in refused(root, "relay", "service", "install", "--from", "/var/lib/edge-relay")
        root.run("systemctl", "start", RELAY)
        assert "on 127.0.0.1:8711" in root.run("relay", "status")
        # It was told the kind at its first run, and runs.
        assert KIND in root.run("relay", "kind", "list")
        assert root.run("find", kinds, "-not", "-user", "root") == ""
        status = json.loads(root.run("relay", "service", "status", "--json"))
        assert (status["UnitFileState"], status["ActiveState"]) == ("enabled", "active")
        again = root.run("relay", "service", "install", "--dry-run").splitlines()
        assert not [line for line in again if line.startswith("write") or "restart" in line]
        root.run("relay", "service", "uninstall")
        assert "root.pem" in root.run("ls", "/var/lib/edge-relay/ca")
        for program in ("relay", "kubelet"):
            root.run(program, "service", "uninstall", "--purge")
        places = ("/etc", "/run", "/var/lib")
        assert root.run("find", *places, "-name", "edge-*", "-not", "-name", "edge-test*") == ""
        users = root.run("getent", "passwd").splitlines()
        assert not [user for user in users if user.startswith("edge-")]


def test_what_root_has_tried_in_the_services_place_becomes_the_services(tmp_path: Path) -> None:
    with started(tmp_path) as root:
        root.run("relay", "ca", "init")
        root.run("relay", "service", "install")
        root.run("systemctl", "start", RELAY)
        root.until(RELAY, "ActiveState", "active")
        assert root.run("find", "/var/lib/edge-relay", "-not", "-user", "edge-relay") == ""
        again = root.run("relay", "service", "install", "--dry-run").splitlines()
        assert not [line for line in again if line.startswith(("write", "take"))]


def test_what_a_local_user_had_put_there_before_the_installation_is_not_used(tmp_path: Path) -> None:
    with started(tmp_path) as root:
        root.run("useradd", "--create-home", "eve")
        for place in ("/etc/edge-kubelet", "/var/lib/edge-relay", "/var/lib/edge-relay/marks"):
            root.run("install", "--directory", "--mode=0777", "--owner=eve", place)
        root.write("/etc/edge-theirs", "theirs\n")
        root.run("ln", "-s", "/etc/edge-theirs", "/etc/edge-kubelet/relay.toml.new")
        said = refused(root, "relay", "service", "install")
        assert "/etc/edge-kubelet belongs to user" in said
        assert "give it to user 0" in said
        root.run("chown", "root:", "/etc/edge-kubelet")
        assert "chmod go-w /etc/edge-kubelet" in refused(root, "relay", "service", "install")
        root.run("chmod", "0755", "/etc/edge-kubelet")
        root.run("relay", "service", "install")
        root.run("ln", "-sfn", "/srv", "/home/eve/hub")
        root.run("chown", "--no-dereference", "eve:", "/home/eve/hub")
        assert "Permission denied" in refused(root, "relay", "ca", "init", "--state-dir", "/home/eve/hub/new")
        root.run("relay", "ca", "init")
        assert not succeeds(root, "systemctl", "start", RELAY)
        assert "/var/lib/edge-relay/marks belongs to user" in root.log(RELAY)
        root.run("rm", "-r", "/var/lib/edge-relay/marks")
        root.run("systemctl", "restart", RELAY)
        root.until(RELAY, "StatusText", "ready")
        assert root.run("cat", "/etc/edge-theirs") == "theirs\n"
        assert "new" not in root.run("ls", "/srv").split()
