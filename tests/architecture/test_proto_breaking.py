"""What breaks clients of the last release is found in every clone, with tags or without."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

_GIT, _MAKE = (shutil.which(name) or name for name in ("git", "make"))


def _git(repository: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    subprocess.run([_GIT, "-C", str(repository), *identity, *arguments], check=True)


@pytest.fixture
def clone(repository: Path, tmp_path: Path) -> Path:
    """The protos and their tools in a repository of their own, with one commit and no tag."""
    shutil.copytree(repository / "proto", tmp_path / "proto", symlinks=True)
    (tmp_path / ".gitignore").write_text("node_modules\n")
    _git(tmp_path, "init", "--quiet")
    _git(tmp_path, "add", "--all")
    _git(tmp_path, "commit", "--quiet", "--message", "One")
    return tmp_path


@pytest.fixture
def job(clone: Path) -> Path:
    """A proto of the clone, of which a field will be taken away."""
    if not (clone / "proto" / "node_modules" / ".bin" / "buf").exists():
        pytest.skip("buf is not installed: make check-protos does that where npm is")
    (path,) = (
        path for path in (clone / "proto" / "foretoken").rglob("job.proto") if path.is_file()
    )
    return path


def _compare(clone: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(clone / "proto" / "breaking.py"), *arguments],
        check=False,
        capture_output=True,
        text=True,
    )


def _take_a_field_away(proto: Path) -> str:
    """Return its number and name."""
    lines = proto.read_text().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if line.startswith("  string "))
    removed = lines.pop(place)
    proto.write_text("".join(lines))
    return removed.split()[1]


def test_the_released_protos_are_those_of_every_service(repository: Path) -> None:
    """Compared with nothing, nothing would break."""
    image = (repository / "proto" / "released" / "protos.binpb").read_bytes()
    released = FileDescriptorSet.FromString(image).file
    services = {service.name for file in released for service in file.service}
    expected = {"CatalogService", "PredictorService", "ProfilerService", "SimulatorService"}
    assert expected == expected & services
    assert {"v1"} == {file.package.rpartition(".")[2] for file in released}
    assert all(file.message_type or file.service or file.enum_type for file in released)


@pytest.mark.parametrize("is_tagged", [False, True])
def test_a_field_taken_away_is_found(is_tagged: bool, clone: Path, job: Path) -> None:
    if is_tagged:
        _git(clone, "tag", "v0.1.0")
    assert 0 == _compare(clone).returncode
    name = _take_a_field_away(job)
    found = _compare(clone)
    assert 0 != found.returncode
    assert f'"{name}"' in found.stdout
    assert ("v0.1.0" if is_tagged else "no release tag in this clone") in found.stdout


def test_a_field_added_breaks_nobody(clone: Path, job: Path) -> None:
    text = job.read_text()
    start = text.index("message ")
    opened = text.index("{", start) + 1
    job.write_text(f"{text[:opened]}\n  // New. Zero: none.\n  string added = 500;{text[opened:]}")
    found = _compare(clone)
    assert (0, "") == (found.returncode, found.stderr)


def test_the_newest_release_before_this_commit_counts(clone: Path, job: Path) -> None:
    """By its numbers, not its letters; neither candidates nor releases of other branches."""
    for tag in ("v0.9.0", "v0.10.0", "v1.0.0-rc1", "version"):
        _git(clone, "tag", tag)
    _git(clone, "checkout", "--quiet", "-b", "other")
    _take_a_field_away(job)
    _git(clone, "commit", "--quiet", "--all", "--message", "Two")
    _git(clone, "tag", "v2.0.0")
    _git(clone, "checkout", "--quiet", "-")
    found = _compare(clone)
    assert (0, "comparing with the protos of v0.10.0\n") == (found.returncode, found.stdout)


def test_a_release_this_clone_lacks_is_said(clone: Path) -> None:
    found = _compare(clone, "--against", "v7.0.0")
    assert 0 != found.returncode
    assert "this clone has no protos of v7.0.0" in found.stderr


def test_what_is_frozen_is_what_later_protos_are_compared_with(clone: Path, job: Path) -> None:
    _take_a_field_away(job)
    assert 0 != _compare(clone).returncode
    assert "make proto-release" in _compare(clone, "--frozen").stderr
    assert 0 == _compare(clone, "--freeze").returncode
    assert 0 == _compare(clone).returncode
    assert 0 == _compare(clone, "--frozen").returncode


def test_a_check_of_everything_compares_the_protos(repository: Path) -> None:
    rules = (repository / "Makefile").read_text().split("\n\n")
    check, breaking = (
        next(rule for rule in rules if f"\n{target}:" in rule)
        for target in ("check", "proto-breaking")
    )
    assert "proto-breaking" in check.split("##")[0].split(":", 2)[2].split()
    assert "proto/breaking.py" in breaking
    assert "make --keep-going check" in (repository / ".ci" / "run").read_text()
