"""Kinds of installed packages: which are read, and by which rules."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import schemas
from schemas.error_roots import ConfigError
from schemas.kind_packages import read_named_kinds
from schemas.kinds import MANIFEST_REF, Fault
from schemas.registry import Contract, SchemaRegistry, read_contract
from schemas.trust import Known, ManifestReason, Outcome, TrustRules
from schemas.violations import ViolationError
from tests.fakes.command_lines import give_away
from tests.fakes.kind_package import INPUT_REF, KIND, OUTPUT_REF, KindPackage, imported
from tests.fakes.signer import ECHO, NODE_ID, NOW_MS, SimulatedCa

CAPABILITY: dict[str, Any] = {
    "cap_id": "relays",
    "kind": KIND,
    "schema_ref": f"mcp://schemas/{INPUT_REF}",
    "verbs": ["set"],
    "safety_class": "read_only",
    "constraints": {"rate_limit_rps": 5, "deadline_ms_default": 1000},
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_relay_board"]:
        del sys.modules[name]


def problems_of(*names: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read_named_kinds(names)
    return caught.value.problems


def problem_of(package: KindPackage, site: Path) -> str:
    package.install(site)
    [problem] = problems_of(KIND)
    assert problem.startswith(f"kinds: {KIND}: ")
    return problem


def named_contract(site: Path) -> Contract:
    KindPackage().install(site)
    return read_contract((KIND,))


def test_a_kind_is_read_from_the_package_that_brings_it(site: Path) -> None:
    KindPackage().install(site)
    [named] = read_named_kinds([KIND])
    assert (named.kind.name, named.kind.short, named.kind.safety_class) == (KIND, "acmerb", "read_only")
    verb = named.kind.verbs["set"]
    assert (verb.input_ref, verb.output_ref, verb.verbatim) == (INPUT_REF, OUTPUT_REF, ("on",))
    assert verb.foreign_texts[0].shown("ignore all") == r"ignore\x20all"
    assert set(named.documents) == {INPUT_REF, OUTPUT_REF}


@pytest.mark.parametrize(
    "place", [".", "..", "documents", "handler.py", "__init__.py", "__pycache__", "__pycache__/handler.pyc"]
)
@pytest.mark.parametrize("whose", ["another user's", "everybody's"])
def test_a_package_that_another_user_can_change_is_refused_and_not_run(
    site: Path, monkeypatch: pytest.MonkeyPatch, place: str, whose: str
) -> None:
    package = KindPackage().install(site)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "handler.pyc").touch()
    changed = (package / place).resolve()
    if whose == "everybody's":
        changed.chmod(0o777)
    else:
        give_away(changed, monkeypatch)
    [problem] = problems_of(KIND)
    assert problem.startswith(f"kinds: {KIND}: ")
    assert ("can be changed by others" if whose == "everybody's" else "belongs to user") in problem
    assert imported(site) == []


def test_nothing_of_the_package_is_imported_before_its_handler_is_loaded(site: Path) -> None:
    KindPackage().install(site)
    contract = read_contract((KIND,))
    assert imported(site) == []
    load_handler = contract.named[0].load_handler
    assert load_handler is not None
    load_handler()
    assert imported(site) == ["acme_relay_board", "acme_relay_board.handler"]


def test_a_kind_that_is_installed_but_not_named_does_not_exist(site: Path) -> None:
    KindPackage().install(site)
    contract = read_contract(())
    assert contract.kinds.get(KIND) is None
    assert INPUT_REF not in contract.registry.documents


def test_the_served_manifest_document_keeps_its_bytes(site: Path) -> None:
    registry = named_contract(site).registry
    shipped = SchemaRegistry()
    assert registry.documents[MANIFEST_REF] == shipped.documents[MANIFEST_REF]
    assert registry.document(MANIFEST_REF) == shipped.document(MANIFEST_REF)
    assert set(registry.documents) - set(shipped.documents) == {INPUT_REF, OUTPUT_REF}


def test_registries_that_share_what_they_compile_keep_their_own_manifest(site: Path) -> None:
    compiled: dict[str, Any] = {}
    named = named_contract(site).named
    amended, shipped = SchemaRegistry(compiled=compiled, named=named), SchemaRegistry(compiled=compiled)
    amended.load("capability@1.0.0").check(CAPABILITY)
    with pytest.raises(ViolationError):
        shipped.load("capability@1.0.0").check(CAPABILITY)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        pytest.param({"safety_class": "reversible"}, "/safety_class", id="another-safety-class"),
        pytest.param({"verbs": ["get"]}, "/verbs/0", id="another-verb"),
        pytest.param({"constraints": {"rate_limit_rps": 11}}, "/constraints/rate_limit_rps", id="too-often"),
        pytest.param(
            {"constraints": {"rate_limit_rps": 1, "deadline_ms_default": 2001}},
            "/constraints/deadline_ms_default",
            id="too-long",
        ),
        pytest.param({"kind": "acme.other"}, "/kind", id="a-kind-that-is-not-named"),
    ],
)
def test_a_manifest_is_held_to_the_clamp_of_the_kind(site: Path, change: dict[str, Any], where: str) -> None:
    admitted = named_contract(site).registry.load("capability@1.0.0")
    admitted.check(CAPABILITY)
    with pytest.raises(ViolationError) as caught:
        admitted.check({**CAPABILITY, **change})
    assert caught.value.where == where


def test_a_manifest_with_the_kind_is_accepted_where_it_is_named_and_only_there(site: Path) -> None:
    node = SimulatedCa().issue()
    wire = node.manifest(capabilities=[ECHO, CAPABILITY])
    known = Known({node.kid: node.identity(NOW_MS)})
    outcomes = []
    for contract in (named_contract(site), read_contract(())):
        rules = TrustRules(contract.registry, contract.kinds)
        outcomes.append(rules.accept(wire, node.node_id, NOW_MS, known))
    assert outcomes[0].outcome is Outcome.ACCEPTED
    assert (outcomes[1].outcome, outcomes[1].reason) == (Outcome.REJECTED, ManifestReason.KIND_UNSUPPORTED)


def test_a_result_is_held_to_the_document_of_the_package(site: Path) -> None:
    tool = named_contract(site).registry.load_tool_io(f"mcp.tool:acmerb.{NODE_ID}.relays.set")
    assert tool.input.is_valid({"on": True})
    assert tool.output.is_valid({"node_id": NODE_ID, "on": True, "label": "pump 1"})
    for label in ("pump\n1", "p\u00fcmp", "x" * 65):
        assert not tool.output.is_valid({"node_id": NODE_ID, "on": True, "label": label})


def test_a_kind_that_no_package_brings_is_refused() -> None:
    assert problems_of("acme.absent") == (
        "kinds: acme.absent: no installed package has an entry point of this name in edge_kubelet.kinds",
    )


def test_every_problem_is_found_at_once() -> None:
    assert len(problems_of("acme.absent", "system.echo", "acme.gone")) == 3


@pytest.mark.parametrize("name", ["system.metrics", "system.echo"])
def test_a_kind_that_ships_cannot_be_replaced(name: str) -> None:
    assert problems_of(name) == (f"kinds: {name}: a kind of this name exists already",)


@pytest.mark.parametrize("short", ["sys", "sysecho"])
def test_the_short_name_of_another_kind_is_refused(site: Path, short: str) -> None:
    package = KindPackage()
    package.row["kind_short"] = short
    assert f"its kind_short {short} is that of system." in problem_of(package, site)


def test_a_kind_that_two_packages_bring_is_refused(site: Path) -> None:
    KindPackage().install(site)
    KindPackage(distribution="impostor").install(site)
    assert "several packages bring it: acme_relay_board, impostor" in problems_of(KIND)[0]


def test_an_editable_installation_is_refused(site: Path) -> None:
    KindPackage().install(site)
    next(site.glob("*.dist-info/RECORD")).write_text("_acme.pth,,\n", "utf-8")
    assert "an editable installation has none" in problems_of(KIND)[0]


@pytest.mark.parametrize("value", ["acme_relay_board:Board", "acme_relay_board.handler", "../up.x:y", "a b"])
def test_an_entry_point_that_names_no_module_of_a_package_is_refused(site: Path, value: str) -> None:
    assert "must be package.module:attribute" in problem_of(KindPackage(entry_point=value), site)


def test_a_missing_file_is_named(site: Path) -> None:
    package = KindPackage().install(site)
    missing = package / "documents" / f"{OUTPUT_REF}.json"
    missing.unlink()
    assert problems_of(KIND)[0].endswith(f"{missing}: No such file or directory")


@pytest.mark.parametrize(
    "text", ["", "{", '{"a": 1, "a": 2}', "[" * 5000], ids=["none", "cut", "twice", "deep"]
)
def test_a_row_that_is_not_strict_json_is_refused(site: Path, text: str) -> None:
    file = KindPackage().install(site) / "kind.json"
    file.write_text(text, "utf-8")
    assert f"{file}: not JSON" in problems_of(KIND)[0]


def test_a_file_that_is_too_large_is_refused(site: Path) -> None:
    file = KindPackage().install(site) / "kind.json"
    file.write_text(" " * 70_000, "utf-8")
    assert str(file) in problems_of(KIND)[0]


def test_a_file_that_others_can_change_is_refused(site: Path) -> None:
    file = KindPackage().install(site) / "kind.json"
    file.chmod(0o666)
    assert str(file) in problems_of(KIND)[0]


def set_at(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return what sets the member at ``path``; None removes it."""

    def change(document: dict[str, Any]) -> None:
        *outer, last = path
        for name in outer:
            document = document[name]
        if value is None:
            del document[last]
        else:
            document[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_at("kind", value="acme.other"), f"/kind must be {KIND}"),
        (set_at("kind", value="system.gpio"), "/kind must"),
        (set_at("kind_short", value="toolongshort"), "/kind_short must"),
        (set_at("safety_class", value="harmless"), "/safety_class must"),
        (set_at("limits", value=None), "/limits is missing"),
        (set_at("limits", "rate_limit_rps", value=5000), "/limits/rate_limit_rps must"),
        (set_at("verbs", value={}), "/verbs must"),
        (set_at("verbs", "erase_it", value={}), "/verbs"),
        (
            set_at("faults", value={"stuck": {"message": "It is stuck."}}),
            "/faults/stuck/suggested_fix is missing",
        ),
        (set_at("faults", value={"Stuck": {"message": "a", "suggested_fix": "b"}}), "/faults"),
        (set_at("verbs", "set", "free_texts", value=[["node_id"]]), "free_texts names node_id"),
        (set_at("verbs", "set", "title", value="Schalt\u00e9r"), "/verbs/set/title must"),
        (set_at("verbs", "set", "description", value="a\nb"), "/verbs/set/description must"),
        (set_at("verbs", "set", "idempotent", value=None), "/verbs/set/idempotent is missing"),
        (set_at("verbs", "set", "handler", value="os:system"), "/verbs/set has a member"),
        (set_at("verbs", "set", "input", value="manifest@1.1.0"), "manifest@1.1.0 must begin with"),
        (set_at("verbs", "set", "input", value="../../etc/passwd@1.0.0"), "/verbs/set/input must"),
        (set_at("schema_ref", value="mcp://schemas/manifest@1.1.0"), "/schema_ref must be"),
        (set_at("verbs", "set", "verbatim", value=["label"]), "verbatim names label"),
        (set_at("verbs", "set", "guarded", value={"node_id": "linux.journal"}), "guarded names node_id"),
        (set_at("verbs", "set", "guarded", value={"none": "linux.journal"}), "guarded names none"),
        (set_at("verbs", "set", "guarded", value={"on": "journal"}), "/verbs/set/guarded/on"),
        (set_at("verbs", "set", "foreign_texts", value=[["node_id"]]), "foreign_texts names node_id"),
        (set_at("verbs", "set", "foreign_texts", value=[["on", "x"]]), "foreign_texts names on/x"),
        (set_at("verbs", "set", "streams", value=True), "its input must require interval_ms"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused_by_file_and_rule(
    site: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    package = KindPackage()
    change(package.row)
    problem = problem_of(package, site)
    assert "kind.json: " in problem
    assert said in problem


TEXT = {"type": "string", "maxLength": 8, "pattern": "^[a-z]*$"}
TWO_CLASSES = TEXT | {"pattern": "^[a-z]*[a-z0-9]*$"}
COUNTS = TEXT | {"pattern": "^[a-z]{0,1000}[a-z0-9]{0,25}$"}
PICTURE = {
    "type": "string",
    "contentEncoding": "base64",
    "contentMediaType": "image/png",
    "maxLength": 245_760,
    "pattern": "^[A-Za-z0-9+/=]+$",
}
INNER_PICTURE = {"type": "object", "additionalProperties": False, "properties": {"picture": PICTURE}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_at("$id", value="mcp://schemas/acme.relay_board.x@1.0.0"), "/$id must be"),
        (set_at("additionalProperties", value=True), "/additionalProperties must"),
        (set_at("additionalProperties", value=None), "/additionalProperties is missing"),
        (set_at("required", value=["on"]), "must require node_id"),
        (set_at("required", value=["node_id", "on", "gone"]), "does not define: gone"),
        (set_at("properties", "node_id", value=TEXT), "node_id of its output must have the pattern"),
        (set_at("properties", "results", value=TEXT), "a meaning in the kinds view: results"),
        (set_at("properties", "Label", value=TEXT), "/properties"),
        (set_at("properties", "label", value={"type": "string"}), "/properties/label/maxLength is missing"),
        (set_at("properties", "label", "pattern", value=None), "/properties/label/pattern is missing"),
        (set_at("properties", "label", "maxLength", value=32_769), "/properties/label/maxLength must"),
        (set_at("properties", "label", "$ref", value="#"), "/properties/label has a member"),
        (set_at("properties", "on", value={}), "/properties/on/type is missing"),
        (set_at("properties", "on", value={"type": ["boolean", "string"]}), "/properties/on/type must"),
        (set_at("properties", "on", value={"type": "boolean", "const": "yes"}), "/properties/on/const must"),
        (
            set_at("properties", "at", value={"type": "string", "format": "date-time"}),
            "/at/maxLength is missing",
        ),
        (
            set_at("properties", "at", value={"type": "string", "maxLength": 9, "format": "uri"}),
            "/at/format must",
        ),
        (set_at("properties", "on", "description", value="\u202eno"), "/properties/on/description must"),
        (
            set_at("properties", "label", value=TWO_CLASSES | {"maxLength": 4097}),
            "/properties/label/pattern must",
        ),
        (set_at("properties", "label", value=COUNTS), "must not add up to more than 1024"),
        (set_at("properties", "label", value=TEXT | {"pattern": "^[z-a]*$"}), "is no regular expression"),
        (set_at("properties", "picture", value=PICTURE | {"maxLength": 245_761}), "/picture/maxLength must"),
        (
            set_at("properties", "picture", value=PICTURE | {"contentMediaType": "image/gif"}),
            "MediaType must",
        ),
        (set_at("properties", "of", value=INNER_PICTURE), "/properties/of"),
        (set_at("properties", "list", value={"type": "array", "items": TEXT}), "list/maxItems is missing"),
        (set_at("properties", "list", value={"type": "array", "maxItems": 3}), "list/items is missing"),
        (
            set_at("properties", "of", value={"type": "object", "properties": {}}),
            "of/additionalProperties",
        ),
        (set_at("$defs", value={}), "has a member"),
        (set_at("allOf", value=[]), "has a member"),
    ],
)
def test_a_document_that_breaks_a_rule_is_refused_by_file_and_rule(
    site: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    package = KindPackage()
    change(package.output)
    problem = problem_of(package, site)
    assert said in problem


@pytest.mark.parametrize(
    ("end", "member"),
    [("input", "nodes"), ("output", "results"), ("output", "failed_ms")],
)
def test_a_member_that_the_kinds_view_takes_is_refused(site: Path, end: str, member: str) -> None:
    package = KindPackage()
    rules = {"type": "integer", "minimum": 10**12, "maximum": 2**53 - 1} if "_ms" in member else TEXT
    getattr(package, end)["properties"][member] = rules
    assert f"members of its {end} have a meaning in the kinds view: {member}" in problem_of(package, site)


PATTERNS = SchemaRegistry(Path(schemas.__path__[0]) / "kind_rules").load("kind_schema@1.1.0")


def document_with(pattern: str) -> dict[str, Any]:
    text = {"type": "string", "maxLength": 8, "pattern": pattern}
    return {**KindPackage().input, "properties": {"on": text}}


@pytest.mark.parametrize(
    "pattern",
    [
        r"^[\x20-\x7E]*$",
        "^[0-9a-hjkmnp-tv-z]{26}$",
        r"^v[0-9]+\.[0-9]+$",
        "^[a-zA-Z0-9_.-]{1,32}$",
        "^on?$",
        "^(on|off)$",
        "^(?:[0-9]{1,3}|all)$",
        "^v[0-9]+(-rc[0-9]+)?$",
        "^[a-z]+\\.(service|timer)$",
    ],
)
def test_a_pattern_of_ascii_classes_is_admitted(pattern: str) -> None:
    PATTERNS.check(document_with(pattern))
    assert not any(re.search(pattern, text) for text in ("\u00e9" * 26, "a\u200bb", "\x7f", "\x1b[0m"))


@pytest.mark.parametrize(
    "pattern",
    ["", "a", "^a", "a$", "^.*$", "^[^a]*$", r"^\w*$", r"^\S+$", r"^[\s]*$", "^a|b$", "^(a)*$", r"^[\x7F]$",
     "^(a|b)*$", "^(a|(b|c))$", "^(a|b)(c|d)$", "^(a||b)$", "^(|a)$", "^(a|b){2}$", "^(?=a)$", "^(a|.)$",
     "^[\u00e9]*$", r"^[\u0000-\uFFFF]*$", "^[a[^b]]$", r"^\p{L}$", "^(?i)k$", "^$", r"^a\$", r"^[\x00-a]$"],
)  # fmt: skip
def test_a_pattern_that_may_admit_more_than_ascii_is_refused(pattern: str) -> None:
    assert not PATTERNS.is_valid(document_with(pattern))


def test_the_problem_does_not_repeat_what_the_package_holds(site: Path) -> None:
    package = KindPackage()
    package.row["verbs"]["set"]["title"] = "\x1b[31mRED"
    assert "RED" not in json.dumps(problem_of(package, site))


def with_members(site: Path, **members: Any) -> Contract:
    package = KindPackage()
    package.output["properties"] |= members
    package.install(site)
    return read_contract((KIND,))


@pytest.mark.parametrize(
    ("member", "fitting", "unfit"),
    [
        ({"type": ["number", "null"], "minimum": 0}, [None, 1.5], ["1", -1]),
        ({"type": ["string", "null"], "enum": ["a", None]}, [None, "a"], ["b"]),
        ({"type": ["array", "null"], "items": {"type": "boolean"}, "maxItems": 1}, [None, [True]], [[1]]),
        ({"type": "string", "const": "v1"}, ["v1"], ["v2", None]),
        ({"type": "integer", "const": 3}, [3], [4]),
        ({"type": "string", "maxLength": 32, "format": "date-time"}, ["2026-11-25T22:45:49+01:00"],
         ["2026-11-25", "soon", "2026-11-25T22:45:49." + "0" * 40 + "Z", None]),
        ({"type": "string", "maxLength": 32_768, "pattern": "^[ -~]*$"}, ["x" * 32_768], ["x" * 32_769]),
        ({"type": "number", "description": "In \u00b0C, \u00b1 0.5."}, [21.5], ["21.5"]),
    ],
)  # fmt: skip
def test_a_member_of_a_result_may_be(
    site: Path, member: dict[str, Any], fitting: list[Any], unfit: list[Any]
) -> None:
    tool = with_members(site, extra=member).registry.load_tool_io(f"mcp.tool:acmerb.{NODE_ID}.relays.set")
    result = {"node_id": NODE_ID, "on": True}
    assert tool.output.is_valid(result)  # what is not required may be absent
    assert all(tool.output.is_valid(result | {"extra": value}) for value in fitting)
    assert not any(tool.output.is_valid(result | {"extra": value}) for value in unfit)


def test_an_image_is_known_from_the_document_of_the_output(site: Path) -> None:
    contract = with_members(site, picture=PICTURE)
    assert contract.named[0].kind.verbs["set"].images == (("picture", "image/png"),)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda package: package.input["properties"].update(picture=PICTURE), "its input are images"),
        (lambda package: package.output["required"].append("picture"), "must not require picture"),
        (
            lambda package: (
                package.row["verbs"]["set"].update(streams=True),
                package.input["properties"].update(interval_ms={"type": "integer"}),
                package.input["required"].append("interval_ms"),
                package.output["properties"].update(ts_ms={"type": "integer"}),
                package.output["required"].append("ts_ms"),
            ),
            "its output are images",
        ),
    ],
)
def test_an_image_leaves_the_output_of_a_call_and_is_nowhere_else(
    site: Path, change: Callable[[KindPackage], object], said: str
) -> None:
    package = KindPackage()
    package.output["properties"]["picture"] = PICTURE
    change(package)
    assert said in problem_of(package, site)


def test_a_free_text_stays_readable(site: Path) -> None:
    package = KindPackage()
    package.row["verbs"]["set"] |= {"free_texts": [["label"]], "foreign_texts": []}
    package.install(site)
    [named] = read_named_kinds([KIND])
    shown = named.kind.verbs["set"].shown({"label": "New connection \u00fc"})
    assert shown == {"label": "New connection \\xfc"}


def test_the_faults_of_a_row_are_those_of_its_kind(site: Path) -> None:
    package = KindPackage()
    package.row["faults"] = {"stuck": {"message": "It is stuck.", "suggested_fix": "Wait."}}
    package.install(site)
    [named] = read_named_kinds([KIND])
    assert dict(named.kind.faults) == {"stuck": Fault("It is stuck.", "Wait.")}


def test_a_manifest_may_have_a_verb_of_the_kind_s_own_and_no_other(site: Path) -> None:
    package = KindPackage()
    package.row["verbs"] = {"switch": package.row["verbs"]["set"]}
    package.install(site)
    contract = read_contract((KIND,))
    admitted = contract.registry.load("capability@1.0.0")
    admitted.check(CAPABILITY | {"verbs": ["switch"]})
    assert not admitted.is_valid(CAPABILITY | {"verbs": ["set"]})
    assert not admitted.is_valid({**ECHO, "verbs": ["switch"]})
    contract.registry.load_tool_io(f"mcp.tool:acmerb.{NODE_ID}.relays.switch")
    assert not SchemaRegistry().load("capability@1.0.0").is_valid(CAPABILITY | {"verbs": ["switch"]})


def test_a_pattern_with_alternatives_is_compared_in_linear_steps(site: Path) -> None:
    worst = "^" + "[a-z]*" * 10 + "(" + "|".join(["[a-z]*" * 2 + "x"] * 9) + ")$"
    text = {"type": "string", "maxLength": 4096, "pattern": worst}
    tool = with_members(site, extra=text).registry.load_tool_io(f"mcp.tool:acmerb.{NODE_ID}.relays.set")
    # An engine that backtracks would take 4096 to the power of ten steps.
    assert not tool.output.is_valid({"node_id": NODE_ID, "on": True, "extra": "a" * 4095 + "\n"})
