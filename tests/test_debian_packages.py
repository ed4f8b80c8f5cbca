"""The Debian packages in the hands of an operator, who types the lines of ``docs/install.md``.

Steps: build · lintian · install the hub, the board and the agent · call · upgrade · roll back ·
uninstall, which leaves nothing. One root under systemd stands for the three machines: each has a home
directory in it. Then the same root has a package of Kubernetes, which has a kubelet too.
"""

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.guide import snippets
from tests.fakes.polling import wait_until
from tests.fakes.story import Block, blocks_of
from tests.fakes.systemd_root import SystemdRoot, SystemdRootError, running

PROJECT = Path(__file__).parents[1]
PAGE = (PROJECT / "docs/install.md").read_text("utf-8")
NEEDED = ("dpkg-deb", "dpkg-shlibdeps", "ar", "lintian", "apt", "/usr/bin/python3")
BOUND_S = 200
LINTIAN_BOUND_S = 420
BUILD_BOUND_S = 1200
"""Of all packages: a few minutes, beside other tests on two slow cores three times as long."""
"""It computes for a minute on a machine of its own, and for several beside other tests."""
KUBELET, RELAY = "edge-kubelet.service", "edge-relay.service"
STATES = ("/var/lib/edge-kubelet", "/var/lib/edge-relay")
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
"""

pytestmark = [pytest.mark.long, pytest.mark.integration, pytest.mark.timeout(1800)]


@dataclass(frozen=True, slots=True)
class Built:
    """What was built: the packages, the same with a higher revision, and the wheels that pip finds."""

    packages: list[Path]
    newer: list[Path]
    wheels: list[Path]


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
        if not (work / "newer").exists():
            build(work)
    return Built(*(sorted((work / name).glob("*.*")) for name in ("packages", "newer", "wheels")))


def build(work: Path) -> None:
    def run(*command: str | Path, directory: Path = PROJECT) -> None:
        subprocess.run(command, cwd=directory, env=environment, timeout=BUILD_BOUND_S, check=True)

    # What is unpacked once need not be small.
    environment = {**os.environ, "DPKG_DEB_COMPRESSOR_TYPE": "gzip", "DPKG_DEB_COMPRESSOR_LEVEL": "1"}
    wheels, pages, packages = work / "wheels", work / "man", work / "packages"
    run(PROJECT / ".venv/bin/hatchling", "build", "--target", "wheel", "--directory", wheels)
    run(PROJECT / ".venv/bin/python", "-P", PROJECT / "packaging/man_pages.py", pages)
    run(PROJECT / "packaging/deb/build", wheels, pages, packages)
    newer = work / "newer.part"
    newer.mkdir()
    for package in packages.iterdir():
        renewed = newer / package.name.replace("-1+", "-2+")
        shutil.copy(package, renewed)
        run("/usr/bin/dpkg-deb", "--control", renewed, newer / "DEBIAN")
        control = newer / "DEBIAN/control"
        control.write_text(control.read_text("utf-8").replace("-1+", "-2+", 1), "utf-8")
        run("/usr/bin/tar", "-C", newer / "DEBIAN", "-czf", "control.tar.gz", ".", directory=newer)
        run("/usr/bin/ar", "r", renewed, "control.tar.gz", directory=newer)
        shutil.rmtree(newer / "DEBIAN")
        (newer / "control.tar.gz").unlink()
    newer.rename(work / "newer")


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


def of_version_0_2(package: Path, work: Path) -> Path:
    """Build from ``package`` what 0.2 had: it owns the short name, and knows nothing of alternatives."""
    root = work / "older"
    subprocess.run(["/usr/bin/dpkg-deb", "--raw-extract", package, root], check=True, timeout=BOUND_S)
    (root / "usr/bin/edge-kubelet").rename(root / "usr/bin/kubelet")
    pages = root / "usr/share/man/man1"
    (pages / "edge-kubelet.1.gz").rename(pages / "kubelet.1.gz")
    for script in ("postinst", "prerm", "postrm"):
        (root / "DEBIAN" / script).unlink()
    lines = (root / "DEBIAN/control").read_text("utf-8").splitlines()
    facts = dict(line.split(": ", 1) for line in lines if line[0] != " ")
    return rebuilt(root, {**facts, "Version": "0.2.0~"}, work / "edge-kubelet_0.2.0~.deb")


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
        root.run("useradd", "--create-home", "ada")
        root.run("sh", "-c", "echo 127.0.0.1 localhost hub.example >/machines.hosts")
        root.run("mount", "--bind", "/machines.hosts", "/etc/hosts")
        root.write("/usr/local/bin/scp", SCP)
        root.run("chmod", "0755", "/usr/local/bin/scp")

    def deliver(self, built: Built) -> None:
        """Put the packages where the page has them."""
        for package in built.packages:
            self.root.copy(package, f"/machines/{self._machine_of(package)}")
        for package in built.newer:
            self.root.copy(package, f"/machines/{self._machine_of(package)}/new")
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

    def install(self, package: Path) -> None:
        self.root.copy(package, "/machines/packages")
        self.root.run("dpkg", "--install", f"/machines/packages/{package.name}")

    def answers(self, program: str) -> str:
        """Return the first word of what ``program`` says of its version: who it is."""
        return self.root.run(program, "--version").split()[0]

    @staticmethod
    def _machine_of(package: Path) -> str:
        return "hub" if package.name.startswith("edge-relay") else "board"


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


def test_the_lines_of_the_page_install_upgrade_roll_back_and_leave_nothing(built: Built, site: Site) -> None:
    hub, tokens, board, status, connect, call, local, *renewals, retire, disconnect, purge = blocks_of(PAGE)
    upgrades, roll_backs = renewals[:2], renewals[2:]
    site.deliver(built)
    files, accounts = site.files(), site.accounts()

    site.type(hub)
    site.type(tokens)
    site.type(board)
    processes = site.ready()
    site.type(status)
    assert "4 tools are listed." in site.type(connect)
    assert all(isinstance(value, float) for value in json.loads(site.type(call).splitlines()[-1]).values())
    site.type(local)
    for unit in (KUBELET, RELAY):
        site.root.run("systemd-analyze", "verify", f"/usr/lib/systemd/system/{unit}")
        assert site.root.show(unit, "UnitFileState") == "enabled"
    assert site.lent_tool_is_called() == "They dance.\n"

    kept = site.kept()
    assert "node.key" in kept
    for blocks, revision in ((upgrades, "-2+"), (roll_backs, "-1+")):
        for block in blocks:
            site.type(block)
        for package in ("edge-relay", "edge-kubelet", "edge-kubelet-agent"):
            assert revision in site.version(package)
        renewed = site.ready()
        assert not set(renewed.values()) & set(processes.values())
        processes = renewed
        assert site.kept() == kept
        site.type(call)

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
    site.install(node_of(built.newer))
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


def test_an_upgrade_from_0_2_which_owned_the_name_and_the_way_back(
    built: Built, site: Site, tmp_path: Path
) -> None:
    files = site.files()
    older = of_version_0_2(node_of(built.packages), tmp_path)
    for package in (older, node_of(built.packages), older, node_of(built.newer)):
        site.install(package)
        assert site.answers("kubelet") == "kubelet"
        owns = site.root.begin("dpkg", "--search", "/usr/bin/kubelet")
        owns.communicate(timeout=BOUND_S)
        assert (owns.returncode == 0) is (package is older)
        assert ("kubelet" in site.root.run("update-alternatives", "--get-selections").split()) is (
            package is not older
        )
    site.install(of_kubernetes(tmp_path, is_link=False))
    assert (site.answers("kubelet"), site.answers("edge-kubelet")) == ("Kubernetes", "kubelet")
    site.root.run("dpkg", "--purge", "edge-kubelet", "kubelet")
    assert sorted(site.files() - files) == []
