"""What may import what, as the architecture describes it, and what runs without the rest."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.guide import product_trees

ROOT = Path(__file__).parent.parent


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", code], check=False, capture_output=True, text=True, timeout=60
    )


def modules_of(package: str) -> list[str]:
    files = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name for name in names if not name.endswith(("__init__", "__main__"))]


# The modules of the node that need its extra `agent`.
WITH_THE_SDK = ["kubelet.local_agent.agent_lines", "kubelet.local_agent.mcp_server"]

BLOCKED = """
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Blocker())
for module in {modules}:
    importlib.import_module(module)
"""


@pytest.mark.integration
def test_schemas_stands_alone() -> None:
    blocked = {"kubelet", "relay", "asyncio", "websockets", "paho", "structlog", "mcp", "starlette"}
    modules = [name for name in modules_of("schemas") if not name.startswith("schemas.process.")]
    done = run_python(BLOCKED.format(blocked=blocked, modules=modules))
    assert done.returncode == 0, done.stderr


@pytest.mark.integration
def test_the_node_runs_without_the_relays_dependencies() -> None:
    blocked = {"relay", "mcp", "mcp_types", "starlette", "uvicorn", "prometheus_client", "pydantic", "httpx2"}
    modules = [name for name in modules_of("kubelet") if name not in WITH_THE_SDK]
    done = run_python(BLOCKED.format(blocked=blocked, modules=modules))
    assert done.returncode == 0, done.stderr


@pytest.mark.integration
@pytest.mark.parametrize("module", ["kubelet.daemon.composition", "kubelet.cli.commands"])
def test_neither_the_daemon_nor_the_command_line_loads_the_local_agent(module: str) -> None:
    loaded = f"import {module}, sys; sys.exit(bool({{'mcp', 'kubelet.local_agent'}} & sys.modules.keys()))"
    assert run_python(loaded).returncode == 0


@pytest.mark.integration
def test_the_guarded_client_runs_without_the_relays_server() -> None:
    blocked = {"kubelet", "uvloop", "httptools", "prometheus_client", "pyrage"}
    modules = [module for module in modules_of("relay") if "remote_tools" in module and ".cli." not in module]
    alone = """
names = ("client", "client.http", "client.remote_tools", "remote_tools")
own = {f"relay.{name}" for name in names}
others = {name for name in sys.modules if name.startswith("relay.") and ".remote_tools." not in name}
assert others == own, others - own
"""
    done = run_python(BLOCKED.format(blocked=blocked, modules=modules) + alone)
    assert done.returncode == 0, done.stderr


@pytest.mark.holds("RFC-0001/1/loopback-not-assumed")
@pytest.mark.integration
@pytest.mark.parametrize(("package", "other"), [("relay", "kubelet"), ("kubelet", "relay")])
def test_the_relay_and_the_node_do_not_import_each_other(package: str, other: str) -> None:
    done = run_python(BLOCKED.format(blocked={other}, modules=modules_of(package)))
    assert done.returncode == 0, done.stderr


@pytest.mark.integration
def test_the_daemon_does_not_load_the_certificate_library() -> None:
    # It would be the largest thing in the daemon's memory, for work that only other commands do.
    loaded = "import kubelet.daemon.composition, sys; sys.exit('cryptography' in sys.modules)"
    assert run_python(loaded).returncode == 0


LIBRARY = ROOT / "relay" / "remote_tools.py"
"""The one package that other programs import by its name."""

PACKAGES = sorted(
    file
    for name in ("schemas", "kubelet", "relay")
    for file in (ROOT / name).rglob("__init__.py")
    if file != LIBRARY
)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda file: str(file.parent.relative_to(ROOT)))
def test_a_package_exports_its_modules_and_nothing_by_another_name(package: Path) -> None:
    source = package.read_text("utf-8")
    (docstring,) = ast.parse(source).body
    assert isinstance(docstring, ast.Expr)


def public_types_of(module: ast.Module) -> Iterator[str]:
    """Yield the names of the public classes and aliases of a module.

    Neither type variables nor the types of options: each module that uses one defines its own, and they are
    not imported elsewhere as what they stand for.
    """
    for statement in module.body:
        match statement:
            case ast.ClassDef(name=name):
                pass
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                if ast.unparse(value).startswith(("TypeVar(", "Annotated[")):
                    continue
            case _:
                continue
        if name[0].isupper() and not name.isupper():
            yield name


def test_a_public_class_or_alias_has_a_name_of_its_own() -> None:
    homes = defaultdict(list)
    for file, module in product_trees().items():
        for name in public_types_of(module):
            homes[name].append(str(file))
    assert len(homes) > 500
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
