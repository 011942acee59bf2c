"""A release is made of a tag, and what it makes is all that users need."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import foretoken

_GIT = shutil.which("git") or "git"
_IMAGE = re.compile(r"foretoken-[a-z]+:(\d+\.\d+\.\d+)")
_VERSION, _STARTER_VERSION = "9.8.7", "0.1.0"
_LINE = "- What a test has added."

# As a user's first program: the front, data files, a service, and its store.
_PROGRAM = """
import pathlib, sys, tempfile, foretoken
assert pathlib.Path(foretoken.__file__).is_relative_to(sys.prefix), foretoken.__file__
assert [p for p in foretoken.__path__ if not p.startswith(sys.prefix)] == [], foretoken.__path__
scenario = foretoken.TrainingScenario(model="llama-3.1-8b", device="h200")
with tempfile.TemporaryDirectory() as folder, foretoken.open(folder) as ft:
    estimate = ft.predict("gemm", device=scenario.device, m=1024, n=4096, k=4096)
    memory = ft.plan_training_memory(scenario)
print(foretoken.__version__, estimate.provenance.name, memory.num_devices)
"""


def _run_git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    subprocess.run(
        [_GIT, "-C", str(folder), *identity, *arguments], check=True, capture_output=True
    )


def _release(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(folder / "deploy" / "release.py"), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.fixture(scope="module")
def clone(
    repository: Path, repository_files: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The files of this working tree in a repository of their own, in one commit without a tag."""
    folder = tmp_path_factory.mktemp("clone")
    for path in repository_files:
        target = folder / path.relative_to(repository)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    changelog = folder / "CHANGELOG.md"
    head, heading, rest = changelog.read_text(encoding="utf-8").partition("## [Unreleased]\n")
    changelog.write_text(f"{head}{heading}\n{_LINE}\n{rest}", encoding="utf-8")
    _run_git(folder, "init", "--quiet")
    _run_git(folder, "add", "--all")
    _run_git(folder, "commit", "--quiet", "--message", "One")
    return folder


@pytest.fixture(scope="module")
def released(clone: Path) -> Path:
    """The folder of a release, prepared, committed, tagged and made."""
    prepared = _release(clone, "--prepare", _VERSION)
    assert (0, "") == (prepared.returncode, prepared.stderr)
    _run_git(clone, "commit", "--quiet", "--all", "--message", "Release")
    _run_git(clone, "tag", f"v{_VERSION}")
    made = _release(clone)
    assert (0, "") == (made.returncode, made.stderr)
    for service in ("app", "catalog", "predictor", "profiler", "simulator"):
        image = f"--target {service} --tag foretoken-{service}:{_VERSION} ."
        assert f"docker build --file deploy/Dockerfile {image}" in made.stdout
    return clone / "dist"


@pytest.fixture(scope="module")
def wheel(released: Path) -> Path:
    """The wheel, which was built from the source archive alone."""
    return released / f"foretoken-{_VERSION}-py3-none-any.whl"


def test_one_version_is_everywhere(repository_files: list[Path], repository: Path) -> None:
    """Of images in manifests, documents and Dockerfiles, and of the tag that Kustomize sets."""
    found = {
        (version, str(path.relative_to(repository)))
        for path in repository_files
        if path.suffix in (".yaml", ".md", "") and "tests" not in path.parts
        for version in _IMAGE.findall(path.read_text(encoding="utf-8", errors="replace"))
    }
    kustomization = (repository / "deploy/k8s/base/kustomization.yaml").read_text(encoding="utf-8")
    versions = {version for version, _ in found} | set(re.findall(r"newTag: (\S+)", kustomization))
    assert {foretoken.__version__} == versions, found


@pytest.mark.slow
def test_what_is_not_ready_is_refused_with_what_to_do(clone: Path) -> None:
    """In the order in which one who releases would meet it."""
    assert "this commit has no tag: git tag v" in _release(clone).stderr
    stray = clone / "stray.txt"
    stray.touch()
    assert "commit or remove what is not in the commit:\n?? stray.txt" in _release(clone).stderr
    stray.unlink()
    other = _release(clone, "9.9.9").stderr
    assert "these are not 9.9.9; run make release-prepare VERSION=9.9.9" in other
    assert "deploy/k8s/base/kustomization.yaml: newTag" in other
    assert "CHANGELOG.md has no section" in _release(clone, foretoken.__version__).stderr
    assert "'nine' is no version" in _release(clone, "--prepare", "nine").stderr
    assert not (clone / "dist").exists()


@pytest.mark.slow
def test_the_notes_are_the_changelog_of_the_version(released: Path) -> None:
    notes = (released / "release-notes.md").read_text(encoding="utf-8")
    assert notes.startswith(_LINE)
    assert "## [" not in notes


@pytest.mark.slow
def test_the_archive_and_the_wheel_are_of_the_version(released: Path) -> None:
    names = {path.name for path in released.iterdir()}
    assert {
        f"foretoken-{_VERSION}.tar.gz",
        f"foretoken-{_VERSION}-py3-none-any.whl",
        f"foretoken_starter-{_STARTER_VERSION}.tar.gz",
        f"foretoken_starter-{_STARTER_VERSION}-py3-none-any.whl",
        "release-notes.md",
        "build-images.sh",
    } == names


@pytest.mark.slow
def test_the_wheel_holds_every_source_and_data_file(
    wheel: Path, source_roots: list[Path], repository_files: list[Path]
) -> None:
    """Devices, models, tables and templates too."""
    expected = {
        path.relative_to(root).as_posix()
        for root in source_roots
        for path in repository_files
        if path.is_relative_to(root / "foretoken")
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("foretoken/")}
    assert (set(), set()) == (expected - packed, packed - expected)
    endings = {Path(name).suffix for name in packed}
    assert {".py", ".pyi", ".yaml", ".j2", ".typed"} <= endings, endings


@pytest.mark.slow
def test_the_starter_s_wheel_holds_its_dataset_and_whose_figures_they_are(
    released: Path, repository: Path, repository_files: list[Path]
) -> None:
    """Nothing of the programs that made it."""
    root = repository / "starter" / "src"
    expected = {
        path.relative_to(root).as_posix() for path in repository_files if path.is_relative_to(root)
    }
    name = f"foretoken_starter-{_STARTER_VERSION}"
    with zipfile.ZipFile(released / f"{name}-py3-none-any.whl") as archive:
        packed = set(archive.namelist())
        notice = archive.read(f"{name}.dist-info/licenses/NOTICE").decode()
    assert expected == {path for path in packed if path.startswith("foretoken_starter/")}
    assert f"{name}.dist-info/licenses/LICENSE" in packed
    assert "NVIDIA CORPORATION" in notice


@pytest.mark.slow
def test_the_wheel_installs_into_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment, the sources of the checkout are not there."""
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(fresh)], check=True)
    (site,) = fresh.glob("lib/python*/site-packages")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(packages), encoding="utf-8")
    install = ["-m", "pip", "--quiet", "--python", str(fresh / "bin" / "python"), "install"]
    subprocess.run(
        [sys.executable, *install, "--no-deps", "--no-index", "--ignore-installed", str(wheel)],
        check=True,
    )

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    program = str(fresh / "bin" / "foretoken")
    assert f"foretoken {_VERSION}" == run(program, "--version")
    assert f"{_VERSION} ANALYTICAL 1" == run(str(fresh / "bin" / "python"), "-c", _PROGRAM)
    predicted = run(
        *(program, "--home", str(tmp_path / "home"), "--output", "json", "predict"),
        *("gemm", "m=1024", "n=4096", "k=4096", "--device", "h200"),
    )
    assert '"provenance": "analytical"' in predicted
