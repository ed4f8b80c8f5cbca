import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from kubelet.cli.service import SERVICE
from kubelet.cli.service import SERVICE as KUBELET
from relay.cli.service import SERVICE as RELAY
from schemas.process import service_host
from schemas.process.service_host import (
    DEFAULT_SCRIPTS,
    PACKAGED_UNITS,
    UNITS,
    Host,
    Ran,
    Remove,
    Run,
    Service,
    ServiceError,
    Take,
    Write,
    as_document,
    as_lines,
    check_reachable,
    install_steps,
    move_steps,
    run_command,
    scripts_of,
    uninstall_steps,
)
from schemas.settings import Form, read_sources

SCRIPTS = Path("/opt/edge/bin")


class Machine:
    """A directory that stands for a machine's root, and the commands that were run on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "etc").mkdir()
        self.commands: list[str] = []
        self.answer = Ran(0, "")
        self.host = Host(root, self._run)

    def _run(self, command: Sequence[str]) -> Ran:
        self.commands.append(" ".join(command))
        return self.answer

    def install(self, scripts: Path = SCRIPTS) -> None:
        """Install the node's service, as the command does."""
        self.host.apply(self.host.due(install_steps(SERVICE, scripts)))

    def files(self) -> dict[str, tuple[str, int]]:
        """Return each file's text and modification time."""
        found = [file for file in self.root.rglob("*") if file.is_file()]
        return {
            str(file.relative_to(self.root)): (file.read_text(), file.stat().st_mtime_ns) for file in found
        }


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_an_installation_that_is_repeated_changes_no_file(machine: Machine) -> None:
    machine.install()
    before = machine.files()
    assert {"etc/systemd/system/edge-kubelet.service", "etc/edge-kubelet/kubelet.toml"} <= before.keys()
    commands = machine.commands.copy()
    machine.commands.clear()
    machine.install()
    assert machine.files() == before
    assert [command for command in commands if command not in machine.commands] == [
        "systemctl try-restart edge-kubelet.service"
    ]


def test_an_upgrade_replaces_the_unit_and_keeps_the_configuration(machine: Machine) -> None:
    machine.install()
    (machine.root / "etc/edge-kubelet/kubelet.toml").write_text("heartbeat = '30s'\n")
    machine.install(Path("/opt/newer/bin"))
    files = machine.files()
    assert "ExecStart=/opt/newer/bin/edge-kubelet" in files["etc/systemd/system/edge-kubelet.service"][0]
    assert files["etc/edge-kubelet/kubelet.toml"][0] == "heartbeat = '30s'\n"


def test_a_file_is_not_written_through_a_link_nor_into_a_directory_of_others(machine: Machine) -> None:
    config, theirs = machine.root / "etc/edge-kubelet", machine.root / "theirs"
    config.mkdir()
    theirs.write_text("theirs")
    (config / "kubelet.toml.new").symlink_to(theirs)
    machine.install()
    assert theirs.read_text() == "theirs"
    (config / "kubelet.toml").unlink()
    config.chmod(0o777)
    with pytest.raises(OSError, match=f"{config} can be changed by others: chmod go-w {config}"):
        machine.install()
    assert not (config / "kubelet.toml").exists()


def test_what_would_be_done_is_shown_and_not_done(machine: Machine) -> None:
    steps = machine.host.due(install_steps(SERVICE, SCRIPTS))
    lines = list(as_lines(steps))
    assert {"run": ("systemctl", "daemon-reload")} in as_document(steps)
    assert "write /etc/systemd/system/edge-kubelet.service" in lines
    assert "    Type=notify" in lines
    assert "run systemctl enable edge-kubelet.service" in lines
    assert machine.files() == {}
    assert machine.commands == []


def test_a_purge_leaves_nothing(machine: Machine) -> None:
    machine.install()
    state = machine.root / "var/lib/edge-kubelet"
    state.mkdir(parents=True)
    (state / "node.key").touch()
    machine.host.apply(machine.host.due(uninstall_steps(SERVICE, purge=False)))
    assert set(machine.files()) == {"etc/edge-kubelet/kubelet.toml", "var/lib/edge-kubelet/node.key"}
    machine.host.apply(machine.host.due(uninstall_steps(SERVICE, purge=True)))
    assert machine.files() == {}
    assert not (machine.root / "etc/edge-kubelet").exists()


def test_a_command_that_fails_ends_the_installation_with_what_it_said(machine: Machine) -> None:
    machine.answer = Ran(1, "Failed to connect to bus\n")
    with pytest.raises(ServiceError, match=r"`systemctl daemon-reload` failed: Failed to connect to bus"):
        machine.host.apply([Run(("systemctl", "daemon-reload"))])
    machine.host.apply([Run(("userdel", "edge-kubelet"), may_fail=True)])


def test_a_directory_is_removed_with_its_files_only_if_it_may_have_some(machine: Machine) -> None:
    machine.host.apply([Write(Path("/etc/x/y"), "text")])
    machine.host.apply([Remove(Path("/etc/x"), if_empty=True)])
    assert set(machine.files()) == {"etc/x/y"}
    machine.host.apply([Remove(Path("/etc/x")), Remove(Path("/etc/x"))])
    assert machine.files() == {}


def test_the_status_is_that_of_systemd(machine: Machine) -> None:
    assert machine.host.status(SERVICE) == {}
    machine.host.apply([Write(UNITS / SERVICE.unit, "")])
    machine.answer = Ran(0, "ActiveState=active\nStatusText=relay: announced\nOther=1\n")
    assert machine.host.status(SERVICE) == {"ActiveState": "active", "StatusText": "relay: announced"}
    machine.answer = Ran(1, "no bus")
    with pytest.raises(ServiceError, match="no bus"):
        machine.host.status(SERVICE)


def test_a_service_of_a_package_is_seen_and_not_changed(machine: Machine) -> None:
    machine.host.check_not_packaged(SERVICE)
    machine.host.apply([Write(PACKAGED_UNITS / SERVICE.unit, "")])
    machine.answer = Ran(0, "ActiveState=active\n")
    assert machine.host.status(SERVICE) == {"ActiveState": "active"}
    with pytest.raises(ServiceError, match="belongs to a package: apt"):
        machine.host.check_not_packaged(SERVICE)


def test_units_that_were_installed_beside_those_of_a_package_can_be_removed(machine: Machine) -> None:
    for directory in (PACKAGED_UNITS, UNITS):
        machine.host.apply([Write(directory / SERVICE.unit, "")])
    machine.host.check_not_packaged(SERVICE)


@pytest.mark.integration
def test_a_command_that_is_not_there_says_what_it_takes() -> None:
    with pytest.raises(ServiceError, match="a system that runs systemd"):
        run_command(["edge-no-such-command"])
    assert run_command(["true"]).status == 0


def test_an_installation_without_the_command_is_refused() -> None:
    with pytest.raises(ServiceError, match="has no command edge-no-such"):
        scripts_of("edge-no-such")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root owns files that root alone can change")
def test_a_program_that_others_can_change_or_the_service_cannot_see_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with TemporaryDirectory(dir="/tmp") as directory:
        program = Path(directory) / "kubelet"
        program.touch(0o755)
        with pytest.raises(ServiceError, match="not visible to a service"):
            check_reachable(program)
        monkeypatch.setattr(service_host, "_HIDDEN", ())
        for mode, why in ((0o744, "closed to the user"), (0o757, "changed by others")):
            program.chmod(mode)
            with pytest.raises(ServiceError, match=why):
                check_reachable(program)
    check_reachable(Path("/bin/sh"))


def test_a_state_directory_is_moved_only_if_it_is_one_and_the_services_is_free(
    machine: Machine, tmp_path: Path
) -> None:
    source = tmp_path / "tried"
    source.mkdir()

    def refused() -> str:
        with pytest.raises(ServiceError) as error:
            machine.host.check_movable(SERVICE, source)
        return str(error.value)

    assert "has no node.key" in refused()
    (source / "node.key").write_text("key")
    machine.host.check_movable(SERVICE, source)
    os.link(source / "node.key", tmp_path / "other")
    assert "node.key is a link" in refused()
    (tmp_path / "other").unlink()
    (source / "leaf.pem").symlink_to(tmp_path)
    assert "leaf.pem is a link" in refused()
    (source / "leaf.pem").unlink()
    place = machine.root / "var/lib/edge-kubelet"
    place.mkdir(parents=True)
    assert list(machine.host.check_movable(SERVICE, source)) == []
    (source / "kinds/acme-oven").mkdir(parents=True)
    assert machine.host.check_movable(SERVICE, source) == ["acme-oven"]
    (machine.root / "etc/edge-kubelet/kinds/acme-oven").mkdir(parents=True)
    assert "/etc/edge-kubelet/kinds/acme-oven is there: `kind uninstall` first" in refused()
    (machine.root / "etc/edge-kubelet/kinds/acme-oven").rmdir()
    (place / "node.key").write_text("key")
    assert "/var/lib/edge-kubelet is in use" in refused()


def test_what_root_has_set_up_in_the_services_place_becomes_the_services(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = machine.root / "var/lib/edge-kubelet"
    (place / "tls").mkdir(parents=True)
    assert not machine.host.has_own_state(SERVICE)  # no node was set up
    (place / "node.key").write_text("key")
    assert machine.host.has_own_state(SERVICE)
    steps = list(install_steps(SERVICE, SCRIPTS, adopts=True))
    at = steps.index(Take(SERVICE.directories[0]))
    assert [step.command[0] for step in steps[at - 1 : at + 4] if isinstance(step, Run)] == [
        "systemd-sysusers",
        "chown",
        "chmod",
        "systemd-tmpfiles",
    ]
    monkeypatch.setattr("pwd.getpwnam", lambda _: SimpleNamespace(pw_uid=os.geteuid()))
    assert not machine.host.has_own_state(SERVICE)  # it is the service's


@pytest.mark.skipif(os.geteuid() != 0, reason="only root takes another user's directory")
@pytest.mark.parametrize("plant", [os.link, os.symlink])
def test_what_is_moved_is_taken_from_its_owner_before_it_is_given_to_the_service(
    machine: Machine, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    """Its owner plants a link after ``check_movable`` has seen none."""
    place, roots = machine.root / "var/lib/edge-kubelet", tmp_path / "root.key"
    (place / "kinds").mkdir(parents=True)
    for directory in (place, place / "kinds"):
        os.chown(directory, 54_321, 54_321)
        directory.chmod(0o777)
    roots.write_text("root's")
    take = [step for step in move_steps(SERVICE, Path("/home/ada/state")) if isinstance(step, Take)]
    machine.host.apply(take)
    for directory in (place, place / "kinds"):
        facts = directory.stat()
        assert (facts.st_uid, stat.S_IMODE(facts.st_mode)) == (0, 0o700)
    plant(roots, place / "kinds/key")
    with pytest.raises(ServiceError, match="kinds/key is a link: no state is behind one"):
        machine.host.apply(take)
    (place / "kinds/key").unlink()
    place.rename(tmp_path / "away")
    place.symlink_to(tmp_path)
    with pytest.raises(OSError, match="Not a directory"):
        machine.host.apply(take)


PIPX_SCRIPTS = Path("/opt/pipx/venvs/edge-kubelet/bin")
BOTH = pytest.mark.parametrize("service", [KUBELET, RELAY], ids=lambda service: service.name)


def written(service: Service) -> dict[Path, Write]:
    return {step.path: step for step in install_steps(service, PIPX_SCRIPTS) if isinstance(step, Write)}


@BOTH
def test_the_unit_starts_the_program_where_it_lies(service: Service) -> None:
    unit = written(service)[Path(f"/etc/systemd/system/{service.name}.service")]
    assert f"\nExecStart={PIPX_SCRIPTS}/{service.name} run " in unit.text
    assert str(DEFAULT_SCRIPTS) not in unit.text


@BOTH
def test_users_are_made_before_the_unit_is_enabled(service: Service) -> None:
    commands = [step.command for step in install_steps(service, PIPX_SCRIPTS) if isinstance(step, Run)]
    assert commands[0] == ("systemd-sysusers", f"/etc/sysusers.d/{service.name}.conf")
    assert commands[-3:] == [
        ("systemctl", "daemon-reload"),
        ("systemctl", "enable", service.unit),
        ("systemctl", "try-restart", service.unit),
    ]


@BOTH
def test_a_state_directory_is_moved_only_where_one_is_named_and_is_the_users_before_tmpfiles_sees_it(
    service: Service,
) -> None:
    def commands(moved: Path | None) -> list[tuple[str, ...]]:
        steps = install_steps(service, PIPX_SCRIPTS, moved)
        return [step.command for step in steps if isinstance(step, Run)]

    named = commands(Path("/home/ada/state"))
    place = str(service.directories[0])
    assert named[1] == ("mv", "--no-target-directory", "/home/ada/state", place)
    programs = [command[0] for command in named]
    assert programs[:5] == ["systemd-sysusers", "mv", "chown", "chmod", "systemd-tmpfiles"]
    assert not [command for command in commands(None) if command[0] in {"mv", "chown", "chmod"}]


@BOTH
def test_packages_of_kinds_are_named_and_become_roots_before_the_state_is_moved(service: Service) -> None:
    steps = move_steps(service, Path("/home/ada/state"), ["acme-oven"])
    commands = [step.command for step in steps if isinstance(step, Run)]
    there = f"{service.kinds}/acme-oven"
    assert ("mv", "--no-target-directory", "/home/ada/state/kinds/acme-oven", there) in commands
    assert ("chown", "--recursive", "--no-dereference", "root:root", there) in commands
    assert [command[0] for command in commands[-3:]] == ["mv", "chown", "chmod"]
    moves = [*move_steps(service, Path("/home/ada/state"), ["acme-oven"])]
    for number, step in enumerate(moves):
        if isinstance(step, Run) and step.command[0] == "mv":
            assert moves[number + 1] == Take(Path(step.command[-1]))
    assert commands[-3][-1] == str(service.directories[0])


@BOTH
def test_the_configuration_names_every_setting_and_is_the_operators_from_then_on(service: Service) -> None:
    sample = written(service)[service.program.usual_file]
    assert sample.keep
    lines = sample.text.splitlines()
    assert not [line for line in lines if line and not line.startswith("#")]
    for setting in service.program.table:
        begins = f'# ["{setting.name}"]' if setting.form is Form.TABLE else f"# {setting.name} = "
        assert [line for line in lines if line.startswith(begins)]


@BOTH
def test_each_line_of_the_configuration_can_be_used_as_it_is(service: Service, tmp_path: Path) -> None:
    file, program = tmp_path / "settings.toml", service.program
    samples = [line[2:] for line in written(service)[program.usual_file].text.splitlines() if "# " in line]
    for setting in program.table:
        begins = (f"{setting.name} = ", f'["{setting.name}"]')
        (sample,) = (line for line in samples if line.startswith(begins))
        file.write_text(sample)
        file.chmod(0o644)
        read_sources(program, {}, file, {}).settings()


@BOTH
def test_removing_leaves_state_configuration_and_user_unless_they_are_purged(service: Service) -> None:
    def changed(*, purge: bool) -> set[object]:
        steps = uninstall_steps(service, purge=purge)
        return {
            step.command if isinstance(step, Run) else step.path
            for step in steps
            if not isinstance(step, Write)
        }

    files = set(written(service))
    kept = {service.program.usual_file, *service.directories, ("userdel", service.name)}
    assert files - {service.program.usual_file} <= changed(purge=False)
    assert not kept & changed(purge=False)
    assert kept | files <= changed(purge=True)
