"""Images without Docker: what the program makes of a Dockerfile, and what it lists of it."""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

_SERVICES = ("app", "catalog", "predictor", "profiler", "simulator")
_DOCKERFILE = """\
# A comment.
FROM python:3.11-slim AS build
ARG EXTRA=none
WORKDIR /src
COPY pyproject.toml README.md ./
COPY code code
RUN mkdir -p /opt/foretoken/bin \\
 && echo "$EXTRA" > /opt/foretoken/extra \\
 && cp code/run.py /opt/foretoken/bin/run.py

FROM python:3.11-slim
RUN groupadd --gid 10001 foretoken
COPY --from=build /opt/foretoken /opt/foretoken
ENV PLACE=/opt/foretoken/place
RUN echo made > "$PLACE"
USER 10001:10001
EXPOSE 50051
ENTRYPOINT ["foretoken", "serve"]
"""


@pytest.fixture(scope="module")
def program(repository: Path) -> Iterator[ModuleType]:
    folder = str(repository / "deploy")
    sys.path.insert(0, folder)
    yield importlib.import_module("build_image")
    sys.path.remove(folder)


def test_a_dockerfile_is_followed_in_a_folder(program: ModuleType, tmp_path: Path) -> None:
    context, into = tmp_path / "context", tmp_path / "into"
    (context / "code" / "__pycache__").mkdir(parents=True)
    (context / "code" / "run.py").write_text("pass\n")
    (context / "code" / "__pycache__" / "run.pyc").write_text("")
    for name in ("pyproject.toml", "README.md"):
        (context / name).write_text("")
    builder = program.Builder(context, into, {"EXTRA": "lake"})
    stage = builder.build(program.read_dockerfile(_DOCKERFILE))
    assert ["build", "1"] == [one.name for one in builder.stages]
    assert {"pyproject.toml", "README.md", "code"} == {
        p.name for p in (into / "build/src").iterdir()
    }
    assert not (into / "build/src/code/__pycache__").exists()
    assert "lake\n" == (stage.folder / "opt/foretoken/extra").read_text()
    assert "pass\n" == (stage.folder / "opt/foretoken/bin/run.py").read_text()
    assert "made\n" == (stage.folder / "opt/foretoken/place").read_text()
    assert ["groupadd --gid 10001 foretoken"] == stage.left_out
    assert ("foretoken", "serve") == stage.entry
    assert [] == list(program.find_faults(stage))


def test_what_an_image_should_not_be_is_found(program: ModuleType, tmp_path: Path) -> None:
    stage = program.Stage("last", tmp_path)
    (tmp_path / "opt/foretoken/bin").mkdir(parents=True)
    (tmp_path / "opt/foretoken/bin/gcc").touch()
    assert ["its user is root", "it can compile: gcc", "it starts nothing"] == list(
        program.find_faults(stage)
    )


def test_a_command_that_fails_ends_the_build(program: ModuleType, tmp_path: Path) -> None:
    text = "FROM base\nRUN exit 3\n"
    with pytest.raises(program.BuildError, match="status 3 of: exit 3"):
        program.Builder(tmp_path, tmp_path / "into", {}).build(program.read_dockerfile(text))


def test_an_image_is_built_of_the_stages_that_it_needs(program: ModuleType, tmp_path: Path) -> None:
    """It has the files, variables and user of what it is based on, not those of its siblings."""
    text = (
        "FROM base AS sources\nARG EXTRA=none\nRUN mkdir -p /opt/foretoken\n"
        "FROM sources AS build-one\nRUN echo $EXTRA > /opt/foretoken/one\n"
        "FROM sources AS build-two\nRUN exit 3\n"
        "FROM base AS user\nRUN useradd one\nENV PLACE=/opt/foretoken/place\nUSER 1:1\n"
        'FROM user AS two\nCOPY --from=build-two /opt /opt\nENTRYPOINT ["two"]\n'
        "FROM user AS one\nCOPY --from=build-one /opt /opt\nRUN echo made > $PLACE\n"
        'ENTRYPOINT ["one"]\n'
    )
    instructions = program.read_dockerfile(text)
    assert ["two", "one"] == program.images(instructions)
    builder = program.Builder(tmp_path, tmp_path / "into", {"EXTRA": "lake"})
    stage = builder.build(program.needed_for("one", instructions))
    assert ["sources", "build-one", "user", "one"] == [one.name for one in builder.stages]
    assert "lake\n" == (stage.folder / "opt/foretoken/one").read_text()
    assert "made\n" == (stage.folder / "opt/foretoken/place").read_text()
    assert ("1:1", ("one",), ["useradd one"]) == (stage.user, stage.entry, stage.left_out)


def test_every_instruction_of_ours_is_known(program: ModuleType, repository: Path) -> None:
    found = program.read_dockerfile((repository / "deploy/Dockerfile").read_text(encoding="utf-8"))
    assert [] == [one for one in found if not hasattr(program.Builder, f"_{one.name.lower()}")]
    assert set(_SERVICES) == set(program.images(found))


# What an image starts: the command line, or a service and the page that it serves.
_RUNS = {
    "app": ("app.cli", "app.front", "client"),
    "catalog": ("catalog.service", "catalog.servicer"),
    "predictor": ("predictor.service", "predictor.servicer"),
    "simulator": ("simulator.service", "simulator.servicer", "app.web", "catalog.quality.page"),
}


@pytest.mark.slow
@pytest.mark.parametrize("service", _RUNS)
def test_what_an_image_leaves_out_it_does_not_import(repository: Path, service: str) -> None:
    text = (repository / "deploy/Dockerfile").read_text(encoding="utf-8")
    (stage,) = re.findall(rf"AS build-{service}\n(.+?)\n\n", text, re.DOTALL)
    (words,) = re.findall(r"slim\.sh /opt/foretoken (.+)", stage.replace("\\\n", " "))
    absent = words.replace("-", "_").split()
    assert absent
    code = (
        "import importlib, pkgutil, sys\n"
        f"sys.modules.update(dict.fromkeys({absent!r}))\n"
        f"for name in {_RUNS[service]!r}:\n"
        "    module = importlib.import_module(f'foretoken.{name}')\n"
        "    path, inside = getattr(module, '__path__', ()), f'{module.__name__}.'\n"
        "    for part in pkgutil.walk_packages(path, inside):\n"
        "        importlib.import_module(part.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "" == done.stderr


def test_a_folder_is_as_large_as_its_files_and_smaller_compressed(
    program: ModuleType, tmp_path: Path
) -> None:
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "same").write_bytes(bytes(10**6))
    (folder / "link").symlink_to("same")
    assert 10**6 == program.size_of(folder)
    assert 0 < program.packed_size_of(folder) < 10**4


def test_parts_are_listed_with_version_license_and_address(program: ModuleType) -> None:
    installed = program.find_distributions(Path(sys.prefix))
    sbom = json.loads(json.dumps(program.build_sbom("foretoken-catalog", "1.2.3", installed)))
    assert ("CycloneDX", "1.6") == (sbom["bomFormat"], sbom["specVersion"])
    parts = {one["name"]: one for one in sbom["components"]}
    pyyaml = next(one for name, one in parts.items() if name.lower() == "pyyaml")
    assert f"pkg:pypi/pyyaml@{pyyaml['version']}" == pyyaml["purl"] == pyyaml["bom-ref"]
    assert "licenses" in pyyaml
    assert len(parts) == len(installed) > 20
