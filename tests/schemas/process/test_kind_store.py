"""`kubelet kind install`, `uninstall` and `list`: what the daemon finds then, and what is refused."""

import hashlib
import json
import stat
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.error_roots import ConfigError
from schemas.files import UntrustedFileError
from schemas.kind_packages import read_named_kinds
from schemas.process.kind_store import KindStore, KindStoreError, read_packages
from schemas.process.wheel import WheelError
from tests.fakes.command_lines import give_away
from tests.fakes.kind_package import KIND, KindPackage, wheel


def pinned(*wheels: Path) -> Path:
    """Write the requirements that pin ``wheels``, beside them."""
    hashes = {file.name.partition("-")[0]: hashlib.sha256(file.read_bytes()).hexdigest() for file in wheels}
    lines = (f"{name}==1.0 \\\n    --hash=sha256:{digest}\n" for name, digest in hashes.items())
    requirements = wheels[0].parent / "requirements.txt"
    requirements.write_text("# what it needs\n" + "".join(lines))
    requirements.chmod(0o644)
    return requirements


@pytest.fixture
def store(tmp_path: Path) -> KindStore:
    (tmp_path / "state").mkdir()
    return KindStore(tmp_path / "state" / "kinds", "kubelet")


@pytest.fixture(autouse=True)
def path_as_it_was() -> Iterator[None]:
    before = [*sys.path]
    yield
    sys.path[:] = before
    for name in [each for each in sys.modules if each.startswith("acme_relay_board")]:
        del sys.modules[name]


def test_what_is_installed_is_found_with_what_it_needs_and_gone_afterwards(
    tmp_path: Path, store: KindStore
) -> None:
    needed = wheel(tmp_path, "acme_bus", {"acme_bus/__init__.py": ""})
    package = store.install(read_packages(wheel(tmp_path, needs="Requires-Dist: acme-bus\n"), pinned(needed)))
    assert (package.name, package.version, package.kinds) == ("acme-relay-board", "1.0", (KIND,))
    assert store.packages() == [package]
    place = tmp_path / "state" / "kinds"
    [named] = read_named_kinds([KIND], place)
    assert str(place / package.name) not in sys.path
    assert named.load_handler is not None
    assert callable(named.load_handler())
    # Last: nothing that the daemon imports can come from there.
    assert sys.path.pop() == str(place / package.name)
    assert (place / package.name / "acme_bus" / "__init__.py").exists()
    assert {stat.S_IMODE(each.stat().st_mode) for each in place.rglob("*") if each.is_file()} == {0o644}
    assert store.install(read_packages(wheel(tmp_path), None)) == package
    assert not (place / package.name / "acme_bus").exists()
    store.uninstall(KIND)
    assert list(place.iterdir()) == []
    with pytest.raises(KindStoreError, match=f"brings {KIND}"):
        store.uninstall(KIND)


def test_nothing_is_installed_below_a_directory_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: KindStore
) -> None:
    """That user could put a link in the place of the packages, through which root would write."""
    (tmp_path / "state/kinds").mkdir()
    packages = read_packages(wheel(tmp_path), None)
    give_away(tmp_path / "state", monkeypatch)
    with pytest.raises(UntrustedFileError, match="state belongs to user"):
        store.install(packages)
    assert list((tmp_path / "state/kinds").iterdir()) == []


def test_a_dry_run_checks_everything_and_writes_nothing(tmp_path: Path, store: KindStore) -> None:
    assert store.install(read_packages(wheel(tmp_path), None), dry_run=True).kinds == (KIND,)
    assert list((tmp_path / "state").iterdir()) == []
    package = KindPackage()
    package.row["kind_short"] = "sysecho"
    package.install(tmp_path / "site")
    files = {
        str(each.relative_to(tmp_path / "site")): each.read_text("utf-8")
        for each in (tmp_path / "site").rglob("*")
        if each.is_file() and each.name not in {"RECORD", "METADATA"}
    }
    with pytest.raises(ConfigError, match=r"kind_short sysecho is that of system\.echo"):
        store.install(read_packages(wheel(tmp_path, files=files), None), dry_run=True)


@pytest.mark.parametrize("module", ["json/__init__.py", "psutil.py", "schemas/text.py", "websockets/x.py"])
def test_a_module_of_the_daemon_or_of_what_it_needs_is_not_replaced(
    tmp_path: Path, store: KindStore, module: str
) -> None:
    needed = wheel(tmp_path, "acme_bus", {module: "", "acme_bus/__init__.py": ""})
    name = module.partition("/")[0].removesuffix(".py")
    with pytest.raises(KindStoreError, match=rf"acme-bus would replace .*\({name}\)"):
        store.install(read_packages(wheel(tmp_path), pinned(needed)))
    assert store.packages() == []


def test_two_kinds_may_share_one_release_of_a_module_but_no_two(tmp_path: Path, store: KindStore) -> None:
    needed = wheel(tmp_path, "acme_bus", {"acme_bus/__init__.py": ""})
    store.install(read_packages(wheel(tmp_path), pinned(needed)))
    again = wheel(tmp_path, "other_bus", {"acme_bus/__init__.py": "1"})
    text = f"[edge_kubelet.kinds]\n{KIND} = acme_relay_board.handler:RelayBoard\n"
    other = wheel(tmp_path, "other_board", {"other_board-1.0.dist-info/entry_points.txt": text})
    with pytest.raises(
        KindStoreError, match=r"other-bus 1\.0 and acme-bus 1\.0 both bring the module acme_bus"
    ):
        store.install(read_packages(other, pinned(again)))


@pytest.mark.integration
def test_what_is_needed_is_pinned_by_hash(
    tmp_path: Path, store: KindStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    kind = wheel(tmp_path, needs="Requires-Dist: acme-bus\nRequires-Dist: psutil\n")
    with pytest.raises(KindStoreError, match="acme-relay-board needs acme-bus: pin it by hash"):
        store.install(read_packages(kind, None))
    needed = wheel(tmp_path, "acme_bus", {"acme_bus/__init__.py": ""})
    requirements = pinned(needed)
    wheel(tmp_path, "acme_bus", {"acme_bus/__init__.py": "import os"})
    with pytest.raises(KindStoreError, match=r"acme_bus|pip did not download"):
        read_packages(kind, requirements)
    requirements.write_text("acme_bus==1.0\n")
    with pytest.raises(KindStoreError, match="every line is NAME==VERSION --hash"):
        read_packages(kind, requirements)


def test_what_is_only_read_may_be_for_another_machine_and_do_without_what_it_needs(
    tmp_path: Path, store: KindStore
) -> None:
    whole = wheel(tmp_path, needs="Requires-Dist: acme-bus\n")
    other = whole.rename(tmp_path / "acme_relay_board-1.0-cp39-cp39-linux_riscv64.whl")
    with pytest.raises(WheelError, match="not those of this interpreter"):
        read_packages(other, None)
    read = KindStore(tmp_path / "state" / "kinds", "relay", run_here=False)
    assert read.install(read_packages(other, None, run_here=False)).kinds == (KIND,)
    assert store.packages() == read.packages()


def test_a_package_without_a_kind_is_refused(tmp_path: Path, store: KindStore) -> None:
    with pytest.raises(KindStoreError, match="it brings no kind"):
        store.install(read_packages(wheel(tmp_path, "acme_bus", {"acme_bus/__init__.py": ""}), None))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("../outside.py", "no path in the package"),
        ("/etc/outside.py", "no path in the package"),
        ("acme/../../outside.py", "no path in the package"),
        ("acme\\outside.py", "no path in the package"),
        ("acme_bus-1.0.data/scripts/kubelet", "for another directory"),
        ("acme/unlisted.py", "RECORD and the files differ"),
    ],
)
def test_a_wheel_with_a_file_that_it_must_not_have_is_refused(tmp_path: Path, path: str, reason: str) -> None:
    file = wheel(tmp_path)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(path, "")
    with pytest.raises(WheelError, match=reason):
        read_packages(file, None)


def test_a_link_and_a_changed_file_and_another_machine_are_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("acme/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    file = wheel(tmp_path)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(WheelError, match="a link"):
        read_packages(file, None)
    whole = wheel(tmp_path).read_bytes()
    file.write_bytes(whole.replace(b"Wheel-Version: 1.0", b"Wheel-Version: 9.9"))
    with pytest.raises(WheelError, match="damaged"):  # stored without compression: the CRC differs
        read_packages(file, None)
    elsewhere = tmp_path / "acme_relay_board-1.0-cp311-cp311-win_amd64.whl"
    elsewhere.write_bytes(whole)
    elsewhere.chmod(0o644)
    with pytest.raises(WheelError, match="not those of this interpreter"):
        read_packages(elsewhere, None)


def test_a_hash_that_is_not_that_of_the_file_is_refused(tmp_path: Path) -> None:
    file = wheel(tmp_path)
    with zipfile.ZipFile(file) as archive:
        contents = {each: archive.read(each) for each in archive.namelist()}
    contents["acme_relay_board/handler.py"] += b"import os\n"
    with zipfile.ZipFile(file, "w") as archive:
        for path, content in contents.items():
            archive.writestr(path, content)
    with pytest.raises(WheelError, match=r"handler.py is not what RECORD says"):
        read_packages(file, None)


def test_more_than_the_bounds_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    file = wheel(tmp_path)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("acme/zeros", bytes(129 << 20))
    with pytest.raises(WheelError, match="more than 128 MiB"):
        read_packages(file, None)


def test_the_list_is_json_for_programs(
    tmp_path: Path, store: KindStore, capsys: pytest.CaptureFixture[str]
) -> None:
    from kubelet.cli.kind import list_installed  # noqa: PLC0415 - the command line, for this test alone

    store.install(read_packages(wheel(tmp_path), None))
    list_installed(tmp_path / "state", as_json=True)
    assert json.loads(capsys.readouterr().out) == [
        {"name": "acme-relay-board", "version": "1.0", "kinds": [KIND]}
    ]
