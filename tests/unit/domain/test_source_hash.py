"""What is compiled is known by every source that its code comes from."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import foretoken
import foretoken.domain
import foretoken.simulator
from foretoken.domain.source_hash import _import_statements, hash_source, import_closure

_SIMULATION = "engine/simulation.py"
_IMPORTED = """
import sys
import foretoken.simulator.engine.simulation
for name, module in sys.modules.items():
    if name.startswith("foretoken.") and getattr(module, "__file__", None):
        print(module.__file__)
"""


def test_the_closure_holds_every_file_that_importing_the_engine_loads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED], capture_output=True, text=True, check=True
    )
    root = Path(foretoken.simulator.__path__[0]) / _SIMULATION
    closure = set(import_closure(root).values())
    assert set() == {Path(line) for line in done.stdout.split()} - closure
    assert Path(foretoken.simulator.__path__[0]) / "engine/layout.py" in closure


@pytest.mark.slow
def test_a_change_of_any_file_that_the_engine_imports_changes_its_key(tmp_path: Path) -> None:
    for package in (foretoken.domain, foretoken.simulator):
        name = package.__name__.rpartition(".")[2]
        ignored = shutil.ignore_patterns("__pycache__", "*.yaml", "*.json")
        shutil.copytree(package.__path__[0], tmp_path / name, ignore=ignored)
    root, folders = tmp_path / "simulator" / _SIMULATION, {"foretoken": (tmp_path,)}
    sources = sorted(set(import_closure(root, folders).values()))
    assert len(sources) > 40
    key = hash_source(root, folders=folders)
    unseen = []
    for source in sources:
        content = source.read_bytes()
        source.write_bytes(content + b"\n# changed\n")
        if hash_source(root, folders=folders) == key:
            unseen.append(source)
        source.write_bytes(content)
    assert [] == unseen
    assert key == hash_source(root, folders=folders)


def test_imports_are_found_as_the_syntax_tree_has_them() -> None:
    """More would do no harm, but for the time that its files take."""
    root = Path(foretoken.simulator.__path__[0]) / _SIMULATION
    for source in import_closure(root).values():
        text = source.read_text("utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        expected = {
            f"{node.module}.{alias.name}"
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        expected |= {
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        }
        found = set(_import_statements(text, ""))
        assert expected <= found, source
        assert set() == {name for name in found - expected if name.startswith("foretoken")}, source


def test_imports_are_followed_from_files_packages_and_functions(tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    sources = {
        "root.py": "from foretoken.kit import (\n    part,  # (a part)\n)\n"
        "import foretoken.plain as plain\nimport numpy",
        "plain.py": "def late():\n    from foretoken.later import VALUE\n    return VALUE",
        "later.py": "VALUE = 1",
        "kit/__init__.py": "",
        "kit/part.py": "import foretoken.root",
        "beside.py": "VALUE = 2",
    }
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    found = import_closure(tmp_path / "root.py", {"foretoken": (tmp_path,)})
    files = {path.relative_to(tmp_path).as_posix() for path in found.values()}
    assert set(sources) - {"beside.py"} == files


_PLUG_IN = """
from foretoken.domain.source_hash import compiled_name
{imports}
def select():
    return RULE
print(compiled_name(select), select.__module__)
"""


@pytest.mark.parametrize(
    ("files", "module"),
    [
        ({"own/rules.py": "from own.deep import RULE", "own/deep.py": ""}, "own.select"),
        ({"own/rules.py": "from .deep.at import RULE", "own/deep/at.py": ""}, "own.select"),
        ({"own/sub/rules.py": "from ..deep import RULE", "own/deep.py": ""}, "own.sub.select"),
        ({"own/rules.py": "RULE = 1", "own/__init__.py": ""}, "own.select"),
        ({"rules.py": "from deep import RULE", "deep.py": ""}, "select"),
    ],
)
def test_a_change_of_what_a_plug_in_imports_of_its_own_changes_its_key(
    tmp_path: Path, files: Mapping[str, str], module: str
) -> None:
    """It may be in any distribution: a package, or modules next to each other."""
    *package, _ = module.split(".")
    imports = f"from {'.' if package else ''}rules import RULE"
    last = [*files][-1]
    for name, text in files.items():
        path = tmp_path / name
        for folder in path.relative_to(tmp_path).parents:
            (tmp_path / folder).mkdir(exist_ok=True, parents=True)
            if folder != Path():
                (tmp_path / folder / "__init__.py").touch()
        path.write_text(text or "RULE = 1")
    plug_in = tmp_path.joinpath(*package, "select.py")
    plug_in.write_text(_PLUG_IN.format(imports=imports))

    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {module}"

    def key() -> str:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        return done.stdout

    before = key()
    assert before.split()[1] == module
    assert before == key()
    (tmp_path / last).write_text("RULE = 1  # changed")
    assert before != key()


def test_what_stands_beside_the_sources_counts_too(tmp_path: Path) -> None:
    root = tmp_path / "root.py"
    root.write_text("VALUE = 1")
    keys = {hash_source(root, others) for others in ((), ("numba 1",), ("numba 2",))}
    assert 3 == len(keys)
