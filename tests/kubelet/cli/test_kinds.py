"""``kubelet kinds``: what is listed, and where the choice of the operator is kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kubelet.cli.kinds import LOOSENED, KindRow, drop_in_steps
from kubelet.config import NodeConfig, read_stored, store
from schemas.addresses import BrokerAddress
from schemas.identity_files import IdentityFiles
from schemas.kinds import shipped_names
from schemas.process.service_host import Remove, Write
from tests.fakes.kind_package import KIND, KindPackage
from tests.fakes.node_command import CANNOT_RUN, DONE, NO, USAGE, Run

pytestmark = pytest.mark.integration

CONFIGURED = NodeConfig(BrokerAddress("mqtt.example", 8883, tls=True), "https://relay.example")


@pytest.fixture
def node(enrolled: IdentityFiles) -> Path:
    store(CONFIGURED, enrolled.root)
    return enrolled.root


def kept(directory: Path) -> tuple[str, ...]:
    stored = read_stored(directory)
    assert stored is not None
    return stored.kinds


def states(run: Run, node: Path) -> dict[str, str]:
    ran = run("kinds", "--json", "--state-dir", node)
    assert ran.code == DONE
    return {each["name"]: each["state"] for each in json.loads(ran.out)}


def test_each_kind_is_listed_with_a_sentence_its_state_and_what_it_needs_and_exposes(
    run: Run, node: Path
) -> None:
    expected = dict.fromkeys(shipped_names(), "off")
    assert states(run, node) == expected | dict.fromkeys(("system.echo", "system.metrics"), "always on")
    shown = run("kinds", "--state-dir", node).out.decode()
    for name in shipped_names():
        row = KindRow.of(name, None)
        assert row.sentence in shown
        assert all(
            f"{each}: {row.about[each]}" in shown for each in ("needs", "exposes") if each in row.about
        )


def test_the_kind_of_a_package_is_listed_with_what_its_row_says_of_it(
    run: Run, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, about = KindPackage(), {"reads": "One register.", "needs": "A bus.", "exposes": "A number."}
    package.row["about"] = about
    package.install(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert run("kinds", "enable", KIND, "--state-dir", node).code == DONE
    listed = run("kinds", "--state-dir", node).out.decode()
    assert "needs: A bus." in listed
    assert "exposes: A number." in listed
    shown = json.loads(run("kinds", "show", KIND, "--json", "--state-dir", node).out)
    assert about.items() <= shown.items()


def test_a_choice_is_kept_beside_the_enrolment_and_counts_least(
    run: Run, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run("kinds", "enable", "linux.journal", "--state-dir", node)
    assert (ran.code, kept(node)) == (DONE, ("linux.journal",))
    assert "takes effect with a restart" in ran.err
    assert "relay token issue --sub NAME --kinds 'system.*,linux.*,linux.journal'" in ran.err
    assert read_stored(node) == replace(CONFIGURED, kinds=("linux.journal",))
    assert states(run, node)["linux.journal"] == "on"
    for _ in range(2):
        assert run("kinds", "enable", "linux.units", "linux.journal", "--state-dir", node).code == DONE
    assert kept(node) == ("linux.journal", "linux.units")
    assert run("kinds", "disable", "linux.journal", "--state-dir", node).code == DONE
    assert kept(node) == ("linux.units",)
    monkeypatch.setenv("KUBELET_KINDS", "linux.sensors")
    assert [name for name, state in states(run, node).items() if state == "on"] == ["linux.sensors"]


def test_a_dry_run_changes_nothing(run: Run, node: Path) -> None:
    ran = run("kinds", "enable", "linux.units", "--dry-run", "--state-dir", node)
    assert (ran.code, kept(node)) == (DONE, ())
    assert ran.out.decode() == f"keep linux.units in {node}/kubelet.json\n"


@pytest.mark.parametrize("where", ["file", "environment", "option", "told"])
def test_where_kinds_are_set_the_place_is_named_and_nothing_is_kept(
    run: Run, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    match where:
        case "file" | "told":
            file = tmp_path / "kubelet.toml"
            file.write_text('kinds = ["linux.units"]\n')
            file.chmod(0o600)
            if where == "told":  # to an earlier start
                (node / "run.json").write_text(json.dumps({"config": str(file)}))
            else:
                monkeypatch.setenv("KUBELET_CONFIG", str(file))
            place = f"{file}, line 1"
        case "environment":
            monkeypatch.setenv("KUBELET_KINDS", "linux.units")
            place = "KUBELET_KINDS"
        case _:
            (node / "run.json").write_text('{"kinds": "linux.units"}')
            place = f"kept in {node}/run.json"
    for verb in ("enable", "disable"):
        ran = run("kinds", verb, "linux.units", "--state-dir", node)
        assert (ran.code, kept(node), ran.err.count("\n")) == (NO, (), 1)
        assert place in ran.err


def test_a_node_that_is_not_enrolled_has_no_place_for_a_choice(run: Run, tmp_path: Path) -> None:
    ran = run("kinds", "enable", "linux.units", "--state-dir", tmp_path)
    assert (ran.code, "enrol first" in ran.err) == (CANNOT_RUN, True)


@pytest.mark.parametrize("name", ["linux.jornal", "X", "", "acme.absent", "linux.units\n", "a" * 65])
@pytest.mark.parametrize("verb", ["enable", "disable", "show"])
def test_a_kind_that_is_not_known_is_a_wrong_command_line(run: Run, node: Path, verb: str, name: str) -> None:
    ran = run("kinds", verb, name, "--state-dir", node)
    assert (ran.code, ran.err.count("\n"), kept(node)) == (USAGE, 1, ())


def test_what_every_node_has_is_neither_enabled_nor_disabled(run: Run, node: Path) -> None:
    for verb in ("enable", "disable"):
        assert run("kinds", verb, "system.echo", "--state-dir", node).code == NO


def test_a_choice_that_is_damaged_is_a_damaged_enrolment(run: Run, node: Path) -> None:
    text = (node / "kubelet.json").read_text()
    for kinds in ('"linux.units"', "[1]", '["X"]', "1"):
        (node / "kubelet.json").write_text(text.replace("{", f'{{"kinds": {kinds},', 1))
        ran = run("kinds", "--state-dir", node)
        assert (ran.code, ran.err.count("\n")) == (CANNOT_RUN, 1), kinds


def test_what_a_table_of_the_ceiling_amounts_to_is_shown(
    run: Run, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kubelet.toml"
    file.write_text(
        '["linux.journal"]\nunits = ["nginx*", "!nginx-secrets*"]\n'
        '["linux.processes"]\nnames = ["!ssh*"]\narguments = true\n["linux.units"]\nunits = []\n'
    )
    file.chmod(0o600)
    monkeypatch.setenv("KUBELET_CONFIG", str(file))

    def facts(name: str) -> dict[str, object]:
        ran = run("kinds", "show", name, "--json", "--state-dir", node)
        assert ran.code == DONE
        shown: dict[str, object] = json.loads(ran.out)
        return shown

    journal = facts("linux.journal")
    assert journal["units"] == "nginx*; not nginx-secrets*"
    assert (journal["ceiling"], journal["sensitive"]) == (f"{file}, line 1", True)
    processes = facts("linux.processes")
    assert (processes["names"], processes["arguments"]) == ("all; not ssh*", True)
    assert facts("linux.units")["units"] == "none"
    assert facts("linux.files")["directories"] == "none"
    assert facts("linux.health")["disk_warning_pct"] == 90
    assert facts("linux.network")["interfaces"] == "all"
    assert "linux.journal" in run("kinds", "show", "linux.journal", "--state-dir", node).out.decode()


@pytest.mark.parametrize("name", sorted(LOOSENED))
def test_the_drop_in_of_a_kind_has_the_directives_that_its_row_names(name: str) -> None:
    [write] = [step for step in drop_in_steps([name]) if isinstance(step, Write)]
    assert write.path == Path(f"/etc/systemd/system/edge-kubelet.service.d/kind-{name}.conf")
    assert write.text.splitlines() == ["[Service]", *LOOSENED[name]]
    assert all(each.partition("=")[2] in KindRow.of(name, None).about["needs"] for each in LOOSENED[name])
    removed = [step.path for step in drop_in_steps([name], remove=True) if isinstance(step, Remove)]
    assert removed == [write.path, write.path.parent]
