"""The committed stubs are what the protos and the pinned tools generate."""

import subprocess
import sys
from pathlib import Path

import pytest


def _read_all(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in sorted((folder / "foretoken" / "api").rglob("*.*"))
        if path.suffix in {".py", ".pyi", ".json"}
    }


@pytest.fixture(scope="module")
def generated(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gen")
    script = repository / "proto" / "generate.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True)
    return folder


def test_committed_stubs_are_what_the_protos_generate(repository: Path, generated: Path) -> None:
    """When this fails, run `.venv/bin/python proto/generate.py`."""
    expected = _read_all(generated)
    assert expected
    assert expected == _read_all(repository / "clients" / "python" / "gen")


def test_every_proto_has_stubs(repository: Path, generated: Path) -> None:
    protos = {
        str(path.relative_to(repository / "proto").with_suffix(""))
        for path in (repository / "proto" / "foretoken").rglob("*.proto")
    }
    names = _read_all(generated)
    stubs = {name.removesuffix("_pb2.py") for name in names if name.endswith("_pb2.py")}
    assert protos == stubs
