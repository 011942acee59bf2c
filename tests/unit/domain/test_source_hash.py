"""What is compiled is known by every source that its code comes from."""

import shutil
import subprocess
import sys
from pathlib import Path

import foretoken
import foretoken.domain
import foretoken.simulator
from foretoken.domain.source_hash import hash_source, import_closure

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


def test_a_change_of_any_file_that_the_engine_imports_changes_its_key(tmp_path: Path) -> None:
    for package in (foretoken.domain, foretoken.simulator):
        name = package.__name__.rpartition(".")[2]
        ignored = shutil.ignore_patterns("__pycache__", "*.yaml", "*.json")
        shutil.copytree(package.__path__[0], tmp_path / name, ignore=ignored)
    root, folders = tmp_path / "simulator" / _SIMULATION, (tmp_path,)
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


def test_imports_are_followed_from_files_packages_and_functions(tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    sources = {
        "root.py": "from foretoken.kit import part\nimport foretoken.plain\nimport numpy",
        "plain.py": "def late():\n    from foretoken.later import VALUE\n    return VALUE",
        "later.py": "VALUE = 1",
        "kit/__init__.py": "",
        "kit/part.py": "import foretoken.root",
        "beside.py": "VALUE = 2",
    }
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    found = import_closure(tmp_path / "root.py", (tmp_path,))
    files = {path.relative_to(tmp_path).as_posix() for path in found.values()}
    assert set(sources) - {"beside.py"} == files


def test_what_stands_beside_the_sources_counts_too(tmp_path: Path) -> None:
    root = tmp_path / "root.py"
    root.write_text("VALUE = 1")
    keys = {hash_source(root, others) for others in ((), ("numba 1",), ("numba 2",))}
    assert 3 == len(keys)
