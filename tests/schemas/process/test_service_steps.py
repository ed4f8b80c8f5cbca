from pathlib import Path

import pytest

from kubelet.cli.service import SERVICE as KUBELET
from relay.cli.service import SERVICE as RELAY
from schemas.process.service_steps import (
    DEFAULT_SCRIPTS,
    Remove,
    Run,
    Service,
    Write,
    install_steps,
    move_steps,
    uninstall_steps,
)

SCRIPTS = Path("/opt/pipx/venvs/edge-kubelet/bin")
BOTH = pytest.mark.parametrize("service", [KUBELET, RELAY], ids=lambda service: service.name)


def written(service: Service) -> dict[Path, Write]:
    return {step.path: step for step in install_steps(service, SCRIPTS) if isinstance(step, Write)}


@BOTH
def test_the_unit_starts_the_program_where_it_lies(service: Service) -> None:
    unit = written(service)[Path(f"/etc/systemd/system/{service.name}.service")]
    assert f"\nExecStart={SCRIPTS}/{service.name} run " in unit.text
    assert str(DEFAULT_SCRIPTS) not in unit.text


@BOTH
def test_users_are_made_before_the_unit_is_enabled(service: Service) -> None:
    commands = [step.command for step in install_steps(service, SCRIPTS) if isinstance(step, Run)]
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
        steps = install_steps(service, SCRIPTS, moved)
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
    assert commands[-3][-1] == str(service.directories[0])


@BOTH
def test_the_configuration_names_every_setting_and_is_the_operators_from_then_on(service: Service) -> None:
    sample = written(service)[service.program.usual_file]
    assert sample.keep
    lines = sample.text.splitlines()
    assert not [line for line in lines if line and not line.startswith("#")]
    for setting in service.program.table:
        assert [line for line in lines if line.startswith(f"# {setting.name} = ")]


@BOTH
def test_removing_leaves_state_configuration_and_user_unless_they_are_purged(service: Service) -> None:
    def changed(*, purge: bool) -> set[object]:
        steps = uninstall_steps(service, purge=purge)
        return {
            step.path if isinstance(step, Remove) else step.command
            for step in steps
            if not isinstance(step, Write)
        }

    files = set(written(service))
    kept = {service.program.usual_file, *service.directories, ("userdel", service.name)}
    assert files - {service.program.usual_file} <= changed(purge=False)
    assert not kept & changed(purge=False)
    assert kept | files <= changed(purge=True)
