# ruff: noqa: INP001, T201 - a program, not a part of the package
"""Makes a release of the tag at this commit: `python deploy/release.py [VERSION]`.

A version has one place, `foretoken/__init__.py`. `--prepare VERSION` writes it there and where
images are named, and closes the changelog's section; what then is committed is tagged `vVERSION`.

The release itself are the source archives of the program and of the starter, a wheel built from
each, the notes of the changelog, and the commands that build the images. Nothing is sent anywhere.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from build_image import images, read_dockerfile

_ROOT = Path(__file__).resolve().parents[1]
_GIT = shutil.which("git") or "git"
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_STATED = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_PLACE = "clients/python/src/foretoken/__init__.py"
_CHANGELOG = "CHANGELOG.md"
_DOCKERFILE = "deploy/Dockerfile"
# Where the distributions lie: the program, and the measurements that come with it, which have a
# version of their own.
_DISTRIBUTIONS = (".", "starter")
# Where an image stands with the version it has: `foretoken-catalog:1.2.3`, or the two lines of
# Kustomize.
_IMAGE = re.compile(r"(foretoken-[a-z]+:)\d+\.\d+\.\d+|(newTag: )\d+\.\d+\.\d+")


class ReleaseError(Exception):
    """Why there is no release; the message says what to do."""


def stated_version(root: Path) -> str:
    """Return the version that the package says it has."""
    found = _STATED.search((root / _PLACE).read_text(encoding="utf-8"))
    if found is None:
        message = f"{_PLACE} states no version"
        raise ReleaseError(message)
    return found[1]


def read_notes(root: Path, version: str) -> str:
    """Return what the changelog says of a version.

    Raises:
        ReleaseError: it has no section of that version, or nothing in it.

    """
    text = (root / _CHANGELOG).read_text(encoding="utf-8")
    pattern = rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## \[|\Z)"
    section = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    if section is None or not section[1].strip():
        message = f"{_CHANGELOG} has no section [{version}] with something in it"
        raise ReleaseError(message)
    return section[1].strip() + "\n"


def prepare(root: Path, version: str) -> None:
    """Write a version wherever it stands, and close the changelog's section of what is unreleased.

    Raises:
        ReleaseError: it is no version, or nothing is unreleased.

    """
    if not _VERSION.fullmatch(version):
        message = f"{version!r} is no version; write it as 1.2.3"
        raise ReleaseError(message)
    read_notes(root, "Unreleased")
    _replace(root / _PLACE, _STATED, f'__version__ = "{version}"')
    for path in image_files(root):
        _replace(path, _IMAGE, rf"\g<1>\g<2>{version}")
    today = datetime.now(tz=UTC).date().isoformat()
    heading = f"## [Unreleased]\n\n## [{version}] - {today}"
    _replace(root / _CHANGELOG, re.compile(r"^## \[Unreleased\]$", re.MULTILINE), heading)


def image_files(root: Path) -> Iterator[Path]:
    """Yield the files that name images with their versions."""
    for folder in ("deploy", "docs"):
        for pattern in ("*.yaml", "*.md", "Dockerfile"):
            for path in sorted((root / folder).rglob(pattern)):
                if _IMAGE.search(path.read_text(encoding="utf-8")):
                    yield path


def check(root: Path, version: str) -> str:
    """Return the version that is to be released from the present commit.

    With `version` the commit needs no tag yet: it is that of the release to come.

    Raises:
        ReleaseError: the tree is not clean, the commit has no tag, or a place says another version.

    """
    if changed := _git(root, "status", "--porcelain"):
        message = f"commit or remove what is not in the commit:\n{changed}"
        raise ReleaseError(message)
    tags = _git(root, "tag", "--points-at", "HEAD", "--list", "v*").split()
    tagged = version or next((tag[1:] for tag in tags if _VERSION.fullmatch(tag[1:])), "")
    if not tagged:
        message = f"this commit has no tag: git tag v{stated_version(root)}"
        raise ReleaseError(message)
    if version and _git(root, "tag", "--list", f"v{version}") and f"v{version}" not in tags:
        message = f"v{version} is a tag of another commit"
        raise ReleaseError(message)
    found = {_PLACE: stated_version(root)}
    for path in image_files(root):
        for match in _IMAGE.finditer(path.read_text(encoding="utf-8")):
            found[f"{path.relative_to(root)}: {match[0]}"] = _VERSION.findall(match[0])[-1]
    if others := [place for place, said in found.items() if said != tagged]:
        places = "\n".join(others)
        message = f"these are not {tagged}; run make release-prepare VERSION={tagged}:\n{places}"
        raise ReleaseError(message)
    return tagged


def build(root: Path, target: Path) -> Sequence[Path]:
    """Build the source archive of each distribution, and from it alone the wheel; return all."""
    return [path for name in _DISTRIBUTIONS for path in _build(root / name, target)]


def _build(root: Path, target: Path) -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        made = Path(folder)
        _run(root, "-m", "hatchling", "build", "-t", "sdist", "-d", folder)
        (archive,) = made.glob("*.tar.gz")
        with tarfile.open(archive) as files:
            files.extractall(made / "files", filter="data")
        (unpacked,) = (made / "files").iterdir()
        _run(unpacked, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
        for path in (archive, *made.glob("*.whl")):
            yield Path(shutil.copy(path, target))


def image_commands(root: Path, version: str) -> list[str]:
    """Return the commands that build the images, one for each target that starts something."""
    return [
        f"docker build --file {_DOCKERFILE} --target {name} --tag foretoken-{name}:{version} ."
        for name in images(read_dockerfile((root / _DOCKERFILE).read_text(encoding="utf-8")))
    ]


def release(root: Path, version: str, target: Path) -> None:
    """Check, then write the release into an empty folder, and say what is left to do."""
    version = check(root, version)
    notes = read_notes(root, version)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    built = build(root, target)
    (target / "release-notes.md").write_text(notes, encoding="utf-8")
    commands = image_commands(root, version)
    (target / "build-images.sh").write_text("\n".join(["set -e", *commands, ""]), encoding="utf-8")
    print(f"foretoken {version}")
    for path in (*built, target / "release-notes.md", target / "build-images.sh"):
        print(f"  {path}")
    print("The images are built by (build-images.sh):")
    for command in commands:
        print(f"  {command}")


def _replace(path: Path, pattern: re.Pattern[str], replacement: str) -> None:
    text = path.read_text(encoding="utf-8")
    path.write_text(pattern.sub(replacement, text), encoding="utf-8")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(  # noqa: S603 - git, with arguments of ours
        [_GIT, "-C", str(root), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _run(folder: Path, *arguments: str) -> None:
    done = subprocess.run(  # noqa: S603 - this Python, with arguments of ours
        [sys.executable, *arguments], cwd=folder, check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise ReleaseError(done.stderr)


def main() -> int:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", nargs="?", default="", help="of a commit that has no tag yet")
    parser.add_argument("--prepare", action="store_true", help="write the version where it stands")
    parser.add_argument("--out", type=Path, default=_ROOT / "dist", help="folder of the release")
    options = parser.parse_args()
    try:
        if options.prepare:
            prepare(_ROOT, options.version)
        else:
            release(_ROOT, options.version, options.out)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
