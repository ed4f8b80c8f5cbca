"""A release in the hands of an operator, who types the lines of ``docs/install.md`` and ``docs/upgrade.md``.

Steps: make the release, and the packages of 0.2 from its commit · lintian · install the hub, the board and
the agent from the apt source · call · uninstall, which leaves nothing · from 0.2 to this version and back,
while another process calls. One root under systemd stands for the three machines: each has a home directory
in it. Then the same root has a package of Kubernetes, which has a kubelet too.
"""

import csv
import fcntl
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import pytest

from tests.compatibility.conftest import PREVIOUS, sources_of
from tests.fakes import steady_caller
from tests.fakes.guide import snippets
from tests.fakes.polling import wait_until
from tests.fakes.steady_caller import failed_outside, first_answer
from tests.fakes.story import Block, blocks_of
from tests.fakes.systemd_root import SystemdRoot, SystemdRootError, running

PROJECT = Path(__file__).parents[1]
PAGE = (PROJECT / "docs/install.md").read_text("utf-8")
UPGRADE = (PROJECT / "docs/upgrade.md").read_text("utf-8")
NEEDED = (
    "dpkg-deb",
    "dpkg-shlibdeps",
    "apt-ftparchive",
    "gpg",
    "minisign",
    "lintian",
    "apt",
    "/usr/bin/python3",
)
BOUND_S = 200
LINTIAN_BOUND_S = 900
"""It computes for a minute on a machine of its own, and for several beside other tests."""
BUILD_BOUND_S = 1200
"""Of all packages: a few minutes, beside other tests on two slow cores three times as long."""
VERSION = metadata.version("edge-kubelet")
KUBELET, RELAY = "edge-kubelet.service", "edge-relay.service"
STATES = ("/var/lib/edge-kubelet", "/var/lib/edge-relay")
PROGRAMS = ("relay", "kubelet")
# Where a package has its files; and what changes there by itself, or is kept by dpkg, apt and useradd.
PLACES = ("/etc", "/usr", "/opt", "/srv", "/var")
NOT_COMPARED = (
    "/var/log",
    "/var/lib/apt",
    "/var/lib/dpkg",
    "/var/cache",
    "/var/lib/PackageKit",
    "/var/lib/systemd/linger",
    "/var/tmp/systemd-private-*-systemd-*",  # noqa: S108  # of the system's own services
)
BACKUPS = {f"/etc/{name}-" for name in ("passwd", "group", "shadow", "gshadow", "subuid", "subgid")}
# scp MACHINE.example:FILE... .
SCP = """#!/bin/sh -e
while [ $# -gt 1 ]; do
  cp -- "/machines/${1%%.example:*}/${1#*:}" .
  shift
done
"""  # What is unpacked once need not be small.
FAST = {"DPKG_DEB_COMPRESSOR_TYPE": "gzip", "DPKG_DEB_COMPRESSOR_LEVEL": "1"}

# How 0.2 was installed; its page has more.
FROM_0_2 = [
    Block(
        "hub",
        None,
        """mkdir -p /etc/edge-kubelet
cat > /etc/edge-kubelet/relay.toml <<'END'
public_url = "https://hub.example:8700"
listen = "0.0.0.0:8700"
tls_own = true
END
relay ca init
systemctl start edge-relay
umask 077
relay() { runuser -u edge-relay -- env RELAY_STATE_DIR=/var/lib/edge-relay relay "$@"; }
relay join-token create --label greenhouse > join-token
relay token issue --sub my-agent > agent-token
relay ca roots --servers --pem > server-root.pem
""",
    ),
    Block(
        "board",
        None,
        """kubelet enroll https://hub.example:8700 --token-file /machines/hub/join-token
systemctl start edge-kubelet
runuser -u edge-relay -- relay node list --json --state-dir /var/lib/edge-relay > /machines/hub/nodes
""",
    ),
]

pytestmark = [pytest.mark.long, pytest.mark.integration, pytest.mark.timeout(1800)]


@dataclass(frozen=True, slots=True)
class Built:
    """A release of this version, whose apt source has the packages of 0.2 too."""

    release: Path

    @property
    def source(self) -> Path:
        return self.release / "apt"

    @property
    def packages(self) -> list[Path]:
        return sorted(self.source.glob(f"pool/*/*_{VERSION}-*.deb"))

    @property
    def older(self) -> list[Path]:
        return sorted(self.source.glob(f"pool/*/*_{PREVIOUS['version']}-*.deb"))

    @property
    def wheels(self) -> list[Path]:
        """What pip finds: this wheel, and those that were fetched for the packages."""
        return [*self.release.glob("*.whl"), *PROJECT.glob("build/release/wheels-*/*.whl")]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    for program in NEEDED:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    if not (PROJECT / ".venv/bin/hatchling").exists():
        pytest.skip("a package is built from the checkout")
    # One for all workers of the run.
    work = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        work = work.parent
    work /= "debian"
    work.mkdir(exist_ok=True)
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (work / "done").exists():
            build(work)
            (work / "done").touch()
    (release,) = (work / "dist").iterdir()
    return Built(release)


def build(work: Path) -> None:
    """Make a release below ``work``, with keys of its own there."""

    def run(*command: str | Path, directory: Path = PROJECT, **variables: str) -> None:
        environment = {**os.environ, **FAST, **variables}
        subprocess.run(command, cwd=directory, env=environment, timeout=BUILD_BOUND_S, check=True)

    older = sources_of(PREVIOUS, work)
    (older / ".venv").symlink_to(PROJECT / ".venv")
    python, wheels, man = older / ".venv/bin/python", work / "wheels", work / "man"
    of_older = {"PYTHONPATH": str(older), "SOURCE_DATE_EPOCH": "1795425948"}
    for command in (
        (python, "-P", "-m", "hatchling", "build", "--target", "wheel", "--directory", wheels),
        (python, "-P", "packaging/man_pages.py", man),
        ("packaging/deb/build", wheels, man, work / "earlier/pool" / suite()),
    ):
        run(*command, directory=older, **of_older)
    home = work / "gpg"
    home.mkdir(mode=0o700)
    run("gpg", "--batch", "--passphrase", "", "--quick-gen-key", "release@edge.example", GNUPGHOME=str(home))
    run("gpg", "--armor", "--output", work / "key.asc", "--export", GNUPGHOME=str(home))
    run("minisign", "-G", "-W", "-s", work / "minisign.key", "-p", work / "minisign.pub")
    run(
        *(PROJECT / ".venv/bin/python", "-P", "packaging/release.py", "--draft", "--here"),
        *("--out", work / "dist", "--earlier", work / "earlier"),
        *("--openpgp-key", "release@edge.example", "--minisign-key", work / "minisign.key"),
        GNUPGHOME=str(home),
    )
    # gpg has started it for this key.
    run("gpgconf", "--kill", "gpg-agent", GNUPGHOME=str(home))


def suite() -> str:
    return platform.freedesktop_os_release()["VERSION_CODENAME"]


def of_kubernetes(work: Path, *, is_link: bool) -> Path:
    """Build a package as Kubernetes': it owns /usr/bin/kubelet, as a program or as a link to one."""
    root = work / "kubernetes"
    program = root / ("usr/lib/kubernetes/kubelet" if is_link else "usr/bin/kubelet")
    for directory in (root / "DEBIAN", root / "usr/bin", program.parent):
        directory.mkdir(parents=True, exist_ok=True)
    program.write_text("#!/bin/sh\necho Kubernetes v1.34.2\n", "utf-8")
    program.chmod(0o755)
    if is_link:
        (root / "usr/bin/kubelet").symlink_to("../lib/kubernetes/kubelet")
    facts = {
        "Package": "kubelet",
        "Version": "1.34.2-1",
        "Architecture": "all",
        "Maintainer": "x <x@y.example>",
    }
    return rebuilt(root, {**facts, "Description": "as that of Kubernetes"}, work / "kubelet_1.34.2-1_all.deb")


def rebuilt(root: Path, facts: Mapping[str, str], package: Path) -> Path:
    control = "".join(f"{name}: {value}\n" for name, value in facts.items())
    (root / "DEBIAN/control").write_text(control, "utf-8")
    command: list[str | Path] = [
        "/usr/bin/dpkg-deb",
        "-Zgzip",
        "-z1",
        "--root-owner-group",
        "--build",
        root,
        package,
    ]
    subprocess.run(command, check=True, timeout=BOUND_S, stdout=subprocess.DEVNULL)
    return package


class Site:
    """The root that stands for the three machines."""

    def __init__(self, root: SystemdRoot) -> None:
        self.root = root
        # A container's policy may refuse to restart services.
        root.run("rm", "-f", "/usr/sbin/policy-rc.d")
        # The root is held in memory: dpkg need not wait for a disk. The man pages of the
        # machine need no new index.
        root.write("/etc/dpkg/dpkg.cfg.d/edge-test", "force-unsafe-io\n")
        root.run("rm", "-f", "/var/lib/man-db/auto-update")
        # The one source is that of the release: the machine's own need a network.
        root.run("sh", "-c", "rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists/*")
        root.run("useradd", "--create-home", "ada")
        root.run("sh", "-c", "echo 127.0.0.1 localhost hub.example >/machines.hosts")
        root.run("mount", "--bind", "/machines.hosts", "/etc/hosts")
        root.write("/usr/local/bin/scp", SCP)
        root.run("chmod", "0755", "/usr/local/bin/scp")

    def deliver(self, built: Built) -> None:
        """Put the apt source where the page has it, and the wheels where pip finds them."""
        for file in (path for path in built.source.rglob("*") if path.is_file()):
            place = Path("/srv/edge-kubelet/apt") / file.relative_to(built.source)
            self.root.copy(file, str(place.parent))
        self.root.copy(built.release.parents[1] / "key.asc", "/srv/edge-kubelet")
        self.root.run("chmod", "-R", "go+rX", "/srv/edge-kubelet")
        [wheel] = built.release.glob("*.whl")
        self.wheel = f"/machines/wheels/{wheel.name}"
        for wheel in built.wheels:
            self.root.copy(wheel, "/machines/wheels")

    def type(self, block: Block) -> str:
        """Type the lines of ``block``, and return what they have printed on standard output."""
        home = f"/machines/{block.machine}"
        self.root.run("mkdir", "-p", home)
        environment = (
            f"HOME={home}",
            "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG=C.UTF-8",
            "DEBIAN_FRONTEND=noninteractive",
            "PIP_CONFIG_FILE=/dev/null",
            "PIP_NO_INDEX=1",
            "PIP_NO_COMPILE=1",
            "PIP_FIND_LINKS=/machines/wheels",
            f"EDGE={self.wheel}",
            "PIP_DISABLE_PIP_VERSION_CHECK=1",
        )
        terminal = self.root.begin("env", "-C", home, *environment, "bash", "-evc", block.lines)
        out, err = terminal.communicate(timeout=BOUND_S)
        assert terminal.returncode == 0, out + err
        return out

    def lent_tool_is_called(self) -> str:
        """Return what the guide's agent prints, run by ada, while the guide's caller lends its tool."""
        programs = snippets((PROJECT / "docs/caller-tools.md").read_text("utf-8"))
        for name, text in programs.items():
            self.root.write(f"/machines/{name}", text)
        token = self.root.run(
            "relay", "token", "issue", "--sub", "ant", "--scope", "sessions:message"
        ).strip()
        variables = (f"EDGE_TOKEN={token}", "SSL_CERT_FILE=/machines/agent/server-root.pem")
        python = ("/usr/lib/edge-relay/bin/python3", "-P", "/machines/caller.py")
        caller = self.root.begin("env", *variables, *python, "https://hub.example:8700/mcp", "greenhouse")
        python = ("/usr/lib/edge-kubelet-agent/bin/python3", "-P", "/machines/agent.py")
        called = self.root.run("runuser", "-u", "ada", "--", *python, "env", "kubelet-mcp")
        caller.communicate(timeout=BOUND_S)
        return called

    def files(self) -> set[str]:
        """Return the files of the system, but those that change by themselves."""
        left_out = " -o ".join(f"-path '{path}'" for path in NOT_COMPARED)
        found = self.root.run("sh", "-c", f"find {' '.join(PLACES)} \\( {left_out} \\) -prune -o -print")
        return set(found.splitlines()) - BACKUPS

    def accounts(self) -> str:
        return self.root.run("sh", "-c", "cut -d: -f1,4 /etc/passwd /etc/group")

    def kept(self) -> str:
        """Return the keys, certificates and settings, by digest; the broker's files are made anew."""
        names = r"\( -name '*.key' -o -name '*.pem' -o -name '*.toml' \) -not -path '*/broker/*'"
        return self.root.run(
            "sh",
            "-c",
            f"find {' '.join(STATES)} /etc/edge-kubelet -type f {names} -exec sha256sum {{}} + | sort",
        )

    def ready(self) -> dict[str, str]:
        """Wait until calls flow; return the process of each service."""
        self.root.until(RELAY, "StatusText", "ready")
        self.root.until(KUBELET, "StatusText", "relay: announced")

        def calls_flow() -> bool:
            status = self.root.begin("kubelet", "status", "--json", "--state-dir", STATES[0])
            status.communicate(timeout=BOUND_S)
            return status.returncode == 0

        wait_until(calls_flow, BOUND_S)
        return {unit: self.root.show(unit, "MainPID") for unit in (RELAY, KUBELET)}

    def version(self, package: str) -> str:
        return self.root.run("dpkg-query", "--show", "--showformat=${Version}", package)

    def owns(self, path: str) -> bool:
        """Return whether a package owns ``path``."""
        search = self.root.begin("dpkg", "--search", path)
        search.communicate(timeout=BOUND_S)
        return search.returncode == 0

    def start_caller(self) -> None:
        """Start a process that calls a tool of the node again and again."""
        self.root.copy(Path(steady_caller.__file__), "/machines")
        (node,) = json.loads(self.root.run("cat", "/machines/hub/nodes"))
        tool = f"sys.{node['node_id']}.sysmetrics.snapshot"
        agent = ("server-root.pem", "agent-token", tool, "/machines/calls")
        line = 'cd /machines/hub && exec python3 -P ../steady_caller.py "$0" "$1" "$2" "$3" >"$4"'
        self.caller = self.root.begin("sh", "-c", line, "https://hub.example:8700/mcp", *agent)

    def stop_caller(self) -> None:
        # A signal to what entered the root would not reach it.
        self.root.run("pkill", "--full", "steady_caller.py")
        out, err = self.caller.communicate(timeout=BOUND_S)
        assert self.caller.returncode == 0, out + err

    def called(self, since: float) -> float:
        """Wait for the result of a call that begins after ``since``, and return when it ended."""
        wait_until(lambda: first_answer(self.printed(), since), BOUND_S)
        return first_answer(self.printed(), since) or since

    def printed(self) -> str:
        """Return what the caller has printed until now."""
        return self.root.run("sh", "-c", "cat /machines/calls || true")

    def install(self, package: Path) -> None:
        self.root.copy(package, "/machines/packages")
        self.root.run("dpkg", "--install", f"/machines/packages/{package.name}")

    def answers(self, program: str) -> str:
        """Return the first word of what ``program`` says of its version: who it is."""
        return self.root.run(program, "--version").split()[0]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    try:
        with running(tmp_path_factory.mktemp("systemd"), with_programs=False) as root:
            yield Site(root)
    except SystemdRootError as reason:
        pytest.skip(f"systemd cannot run here as PID 1: {reason}")


def test_a_package_brings_completion_and_says_what_is_next(built: Built, tmp_path: Path) -> None:
    for program in ("kubelet", "relay"):
        [package] = (each for each in built.packages if each.name.startswith(f"edge-{program}_"))
        root = tmp_path / program
        root.mkdir()
        for option in ("--extract", "--control"):
            unpack = ["/usr/bin/dpkg-deb", option, package, root / option]
            subprocess.run(unpack, timeout=BOUND_S, check=True)
        share, script = root / "--extract/usr/share", root / "--control/postinst"
        for name in (
            f"bash-completion/completions/edge-{program}",
            f"zsh/vendor-completions/_edge-{program}",
            f"fish/vendor_completions.d/edge-{program}.fish",
        ):
            assert f"_EDGE_{program.upper()}_COMPLETE=" in (share / name).read_text("utf-8")
        assert f'echo "edge-{program} is installed. Next' in script.read_text("utf-8")
        assert f"systemctl start edge-{program}" in script.read_text("utf-8")


def test_the_digests_of_pip_s_lists_are_of_what_is_in_the_package_not_where_it_was_built(
    built: Built, tmp_path: Path
) -> None:
    for package in built.packages:
        root = tmp_path / package.name
        subprocess.run(["/usr/bin/dpkg-deb", "--extract", package, root], timeout=BOUND_S, check=True)
        lists = list(root.glob("usr/lib/*/lib/python3.*/site-packages/*.dist-info/RECORD"))
        assert lists
        for record in lists:
            for name, listed, _ in csv.reader(record.read_text("utf-8").splitlines()):
                if listed:  # the name of a program has no digest
                    digest = urlsafe_b64encode(sha256((record.parents[1] / name).read_bytes()).digest())
                    assert listed == f"sha256={digest.decode().rstrip('=')}", (record, name)


def test_lintian_finds_no_error(built: Built) -> None:
    # The agent's package has nothing that the other two have not, and its libraries are among the relay's.
    packages = [package for package in built.packages if "agent" not in package.name]
    found = subprocess.run(
        ["/usr/bin/lintian", "--allow-root", "--fail-on=error,warning", *packages],
        capture_output=True,
        text=True,
        timeout=LINTIAN_BOUND_S,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_lines_of_the_page_install_and_leave_nothing(built: Built, site: Site) -> None:
    hub, tokens, board, status, connect, call, local, retire, disconnect, purge = blocks_of(PAGE)
    site.deliver(built)
    files, accounts = site.files(), site.accounts()

    site.type(hub)
    site.type(tokens)
    site.type(board)
    site.ready()
    site.type(status)
    # More than the four of the view: the enrolment enables kinds that this relay knows.
    assert int(re.findall(r"(\d+) tools are listed\.", site.type(connect))[0]) > 4
    assert all(isinstance(value, float) for value in json.loads(site.type(call).splitlines()[-1]).values())
    site.type(local)
    for unit in (KUBELET, RELAY):
        site.root.run("systemd-analyze", "verify", f"/usr/lib/systemd/system/{unit}")
        assert site.root.show(unit, "UnitFileState") == "enabled"
    assert site.lent_tool_is_called() == "They dance.\n"

    site.type(retire)
    site.type(disconnect)
    kept = site.kept()
    assert "root.pem" in kept
    site.root.run("dpkg", "--remove", "edge-relay")
    assert site.kept() == kept
    site.type(purge)
    assert sorted(site.files() - files) == []
    assert site.accounts() == accounts
    assert '"edge"' not in site.root.run("cat", "/machines/agent/.claude.json")


def node_of(packages: list[Path]) -> Path:
    return next(package for package in packages if package.name.startswith("edge-kubelet_"))


@pytest.mark.parametrize("is_link", [False, True], ids=["program", "link"])
def test_a_kubelet_of_kubernetes_that_comes_later_takes_the_name(
    built: Built, site: Site, tmp_path: Path, *, is_link: bool
) -> None:
    files = site.files()
    theirs = of_kubernetes(tmp_path, is_link=is_link)
    site.install(node_of(built.packages))
    assert site.answers("kubelet") == site.answers("edge-kubelet") == "kubelet"
    page = "/usr/share/man/man1/kubelet.1.gz"
    assert site.root.run("readlink", "--canonicalize", page).strip() == page.replace(
        "kubelet", "edge-kubelet"
    )
    site.install(theirs)
    assert site.answers("kubelet") == "Kubernetes"
    site.install(node_of(built.packages))
    assert (site.answers("kubelet"), site.answers("edge-kubelet")) == ("Kubernetes", "kubelet")
    site.root.run("dpkg", "--purge", "edge-kubelet")
    assert site.answers("kubelet") == "Kubernetes"
    assert site.root.run("dpkg", "--verify", "kubelet") == ""
    site.root.run("dpkg", "--purge", "kubelet")
    assert sorted(site.files() - files) == []


@pytest.mark.parametrize("is_link", [False, True], ids=["program", "link"])
def test_a_kubelet_of_kubernetes_that_is_there_keeps_the_name(
    built: Built, site: Site, tmp_path: Path, *, is_link: bool
) -> None:
    files = site.files()
    site.install(of_kubernetes(tmp_path, is_link=is_link))
    site.install(node_of(built.packages))
    assert (site.answers("kubelet"), site.answers("edge-kubelet")) == ("Kubernetes", "kubelet")
    site.root.run("dpkg", "--purge", "kubelet")
    site.root.run("dpkg-reconfigure", "edge-kubelet")
    assert site.answers("kubelet") == "kubelet"
    site.root.run("dpkg", "--purge", "edge-kubelet")
    assert sorted(site.files() - files) == []


def test_a_release_is_not_made_where_it_would_remove_the_source_that_it_goes_on_from(tmp_path: Path) -> None:
    main = runpy.run_path(str(PROJECT / "packaging/release.py"))["main"]
    earlier = tmp_path / f"edge-kubelet-{VERSION}" / "apt"
    (earlier / "pool").mkdir(parents=True)
    assert main(["--draft", "--here", "--out", str(tmp_path), "--earlier", str(earlier)]) == 3
    assert (earlier / "pool").is_dir()


def test_bills_of_materials_are_made_by_the_tools_of_the_lock_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = runpy.run_path(str(PROJECT / "packaging/release.py"))["Release"]
    ran = list[tuple[str | Path, ...]]()
    monkeypatch.setattr(release, "_run", lambda _self, *command: ran.append(command))
    names = release.bills_of_materials.__globals__
    monkeypatch.setitem(names, "_FETCHED", tmp_path / "fetched")
    monkeypatch.setitem(names, "_PROJECT", tmp_path)
    (tmp_path / "pyproject.toml").write_text((PROJECT / "pyproject.toml").read_text("utf-8"), "utf-8")
    made = release(tmp_path / "out", 0)

    def is_installed_for(lock: str) -> bool:
        (tmp_path / "requirements-release.lock").write_text(lock, "utf-8")
        ran.clear()
        made.bills_of_materials()
        program = Path(ran[-1][0]).with_name("cyclonedx-py")
        program.parent.mkdir(parents=True, exist_ok=True)
        program.touch()
        return any("install" in command for command in ran)

    tried = ["cyclonedx-bom==7.0", "cyclonedx-bom==7.0", "cyclonedx-bom==7.1"]
    assert [is_installed_for(lock) for lock in tried] == [True, False, True]


def test_what_a_key_signs_is_verified(built: Built) -> None:
    work = built.release.parents[1]
    for file in (built.release / "SHA256SUMS", *built.release.glob("*.whl")):
        verify: list[str | Path] = ["/usr/bin/minisign", "-V", "-p", work / "minisign.pub", "-m", file]
        subprocess.run(verify, check=True, timeout=BOUND_S)
    subprocess.run(
        ["/usr/bin/sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"],
        cwd=built.release,
        check=True,
        timeout=BOUND_S,
    )
    for part in ("node", "agent", "relay"):
        (bill,) = built.release.glob(f"*-{part}.cdx.json")
        listed = {each["name"] for each in json.loads(bill.read_text("utf-8"))["components"]}
        lock = (PROJECT / f"requirements-{part}.lock").read_text("utf-8")
        assert listed == set(re.findall(r"(?m)^([\w.-]+)(?:\[.*\])?==", lock))


def test_a_fleet_goes_from_0_2_to_this_version_and_back_while_calls_are_made(
    built: Built, site: Site
) -> None:
    upgrade_hub, upgrade_board, roll_back_board, roll_back_hub = blocks_of(UPGRADE)
    site.deliver(built)
    for name in {package.name.split("_")[0] for package in built.older}:
        (older,) = (package for package in built.older if package.name.startswith(f"{name}_"))
        site.install(older)
    for block in FROM_0_2:
        site.type(block)
    before = site.ready()
    install = blocks_of(PAGE)[0]
    site.type(replace(install, lines=install.lines.partition("apt update")[0]))
    kept = site.kept()
    assert "node.key" in kept
    site.start_caller()
    restarts = []
    for step, version in (
        (upgrade_hub, VERSION),
        (upgrade_board, VERSION),
        (roll_back_board, PREVIOUS["version"]),
        (roll_back_hub, PREVIOUS["version"]),
    ):
        begun = site.called(time.time())
        site.type(step)
        package = "edge-relay" if step.machine == "hub" else "edge-kubelet"
        assert version in site.version(package)
        renewed = site.ready()
        unit = f"{package}.service"
        assert renewed[unit] != before[unit]
        before = renewed
        restarts.append((begun, site.called(time.time())))
        assert site.kept() == kept
        # 0.2 owned the short names, which are alternatives since.
        assert site.owns(f"/usr/bin/{package.removeprefix('edge-')}") is (version == PREVIOUS["version"])
    site.called(time.time())
    site.stop_caller()
    assert failed_outside(site.printed(), restarts) == []
    site.root.run("dpkg", "--purge", "edge-relay", "edge-kubelet", "edge-kubelet-agent")


def test_what_another_user_had_in_the_places_of_a_package_stops_neither_an_upgrade_nor_a_purge(
    built: Built, site: Site
) -> None:
    """Hers with a hard link to a file of root's; settings behind a link to hers; a mount; a process."""
    files, secret = site.files(), "/srv/theirs/root.key"
    site.root.write(secret, "theirs\n")
    site.root.run("chmod", "600", secret)
    for program in PROGRAMS:
        state, kinds = f"/var/lib/edge-{program}", "relay-kinds" if program == "relay" else "kinds"
        planted = f"mkdir -p ca tls; mkfifo node_names.jsonl kubelet.json; ln {secret} issued_tokens.jsonl"
        site.root.run(
            "sh",
            "-ec",
            f"mkdir {state}; cd {state}; {planted}; chown -R ada . ; chown root {secret}; chmod 0777 .;"
            f"mkdir -p /home/ada/etc/{kinds}; ln -s /home/ada/etc /etc/edge-kubelet",
        )
        (package,) = (each for each in built.packages if each.name.startswith(f"edge-{program}_"))
        for _ in range(2):
            site.install(package)
        assert VERSION in site.version(f"edge-{program}")
        assert site.root.run("stat", "--format=%U %a", secret) == "root 600\n"
        site.root.run("mount", "-t", "tmpfs", "tmpfs", state)
        of_service = site.root.begin("runuser", "-u", f"edge-{program}", "--", "sh", "-c", "echo; exec cat")
        assert of_service.stdout is not None
        of_service.stdout.readline()
        assert f": userdel edge-{program}\n" in site.root.run("sh", "-c", f"dpkg --purge edge-{program} 2>&1")
        of_service.communicate("", BOUND_S)
        site.root.run("userdel", f"edge-{program}")
        site.root.run("umount", state)
        assert not site.owns(f"/usr/bin/edge-{program}")
        site.root.run("test", "-d", f"/home/ada/etc/{kinds}")
        site.root.run("rm", "-r", state, "/etc/edge-kubelet", "/home/ada/etc")
    assert site.root.run("cat", secret) == "theirs\n"
    site.root.run("rm", "-r", "/srv/theirs")
    assert sorted(site.files() - files) == []


def test_links_that_a_services_user_has_planted_change_no_file_of_others_and_stop_no_upgrade(
    built: Built, site: Site
) -> None:
    def as_service(program: str, lines: str) -> None:
        site.root.run(
            "runuser", "-u", f"edge-{program}", "--", "sh", "-ec", f"cd /var/lib/edge-{program}; {lines}"
        )

    def others() -> str:
        facts = site.root.run("stat", "--format=%n %U %G %a", *victims)
        return facts + site.root.run("sha256sum", *victims[2:])

    def fails(*command: str) -> str:
        process = site.root.begin(*command)
        out, err = process.communicate(timeout=BOUND_S)
        assert process.returncode not in {0, -9}, out
        assert "Traceback" not in out + err
        return err or out

    victims = ("/etc/shadow", "/etc/ssl", "/srv/theirs/sudoers", "/srv/theirs/root.key")
    files = site.files()
    site.root.write("/srv/theirs/sudoers", "# none\n")
    site.root.write("/srv/theirs/root.key", "theirs\n")
    before = others()
    package = {
        name: next(p for p in built.packages if p.name.startswith(f"edge-{name}_")) for name in PROGRAMS
    }
    for program in PROGRAMS:
        site.install(package[program])
    as_service(
        "relay",
        "ln -s /srv/theirs ca; ln -s /etc/ssl tls; ln -s /etc/shadow node_names.jsonl;"
        "ln -s /srv/theirs/sudoers issued_tokens.jsonl; mkfifo audit.jsonl;"
        "cd ../edge-relay-broker; ln -s /etc/shadow generation",
    )
    as_service("kubelet", "ln -s /srv/theirs/sudoers kubelet.json; ln -s /srv/theirs/root.key node.key")
    for program in PROGRAMS:
        site.install(package[program])
        assert VERSION in site.version(f"edge-{program}")
        assert fails(program, "doctor")
    for command in ("relay ca init", "relay ca list", "relay node list", "relay audit verify"):
        assert fails(*command.split()).startswith("relay: ")
    assert fails("relay", "backup", "/srv/backup.edge").startswith("relay: ")
    assert fails("kubelet", "init").startswith("kubelet: ")
    assert fails("kubelet", "enroll", "https://hub.example:1", "--token-file", "/dev/null").startswith(
        "kubelet: "
    )
    assert others() == before
    for program in PROGRAMS:
        site.root.run("dpkg", "--purge", f"edge-{program}")
    assert others() == before
    site.root.run("rm", "-r", "/srv/theirs")
    assert sorted(site.files() - files) == []
