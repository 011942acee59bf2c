# ruff: noqa: INP001 - a script next to the protos, not a package
"""Check that clients of the last release can talk to these protos: `python proto/breaking.py`.

They are compared with those of the newest tag vX.Y.Z before them. A clone without tags, or sources
without git, have `released/protos.binpb` instead, the protos as they were released, committed. It
is not the merge base with a branch: of a clone of that branch this is the branch itself, which
nothing differs from.

`python proto/breaking.py --against REF` compares with another state of the repository, `--freeze`
makes the present protos the released ones, and `--frozen` fails where they are not.
"""

import argparse
import io
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

_GIT = shutil.which("git") or "git"
_RELEASE = re.compile(r"v(\d+)\.(\d+)\.(\d+)")


def find_newest_release(repository: Path) -> str | None:
    """Return the newest tag vX.Y.Z that the present commit descends from, if there is one."""
    # Without a repository, or a commit in it, nothing is listed: no release.
    listed = _run(_GIT, "-C", str(repository), "tag", "--list", "v*", "--merged", "HEAD").stdout
    found = [match for tag in listed.decode().split() if (match := _RELEASE.fullmatch(tag))]
    newest = max(found, key=lambda match: [int(part) for part in match.groups()], default=None)
    return newest[0] if newest else None


def compare(repository: Path, reference: str | None) -> int:
    """Compare with the protos of a tag, branch or commit, or the released ones; return a status."""
    protos = repository / "proto"
    if reference is None:
        image = protos / "released" / "protos.binpb"
        if not image.stat().st_size:
            message = f"{image} is empty"
            raise SystemExit(message)
        sys.stdout.write(f"no release tag in this clone: comparing with {image.name}\n")
        return _run_buf(protos, "breaking", str(protos), "--against", str(image))
    sys.stdout.write(f"comparing with the protos of {reference}\n")
    archive = _run(_GIT, "-C", str(repository), "archive", reference, "proto")
    if archive.returncode:
        message = f"this clone has no protos of {reference}"
        raise SystemExit(message)
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        released = Path(folder) / "proto"
        return _run_buf(protos, "breaking", str(protos), "--against", str(released))


def freeze(repository: Path) -> int:
    """Write the present protos as the released ones; return a status."""
    protos = repository / "proto"
    image = protos / "released" / "protos.binpb"
    return _run_buf(protos, "build", str(protos), "--exclude-source-info", "-o", str(image))


def is_frozen(repository: Path) -> bool:
    """Return whether the released protos are the present ones."""
    protos = repository / "proto"
    with TemporaryDirectory() as folder:
        image = Path(folder) / "protos.binpb"
        status = _run_buf(protos, "build", str(protos), "--exclude-source-info", "-o", str(image))
        frozen = (protos / "released" / image.name).read_bytes()
        return status == 0 and image.read_bytes() == frozen


def _run_buf(protos: Path, *arguments: str) -> int:
    found = _run(str(protos / "node_modules" / ".bin" / "buf"), *arguments)
    sys.stdout.write(found.stdout.decode())
    return found.returncode


def _run(*command: str) -> "subprocess.CompletedProcess[bytes]":
    """Run a program; its output is returned, its errors are shown."""
    return subprocess.run(command, stdout=subprocess.PIPE, check=False)  # noqa: S603 - ours alone


def main() -> int:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", default="", help="a tag, branch or commit")
    parser.add_argument("--freeze", action="store_true", help="make these the released ones")
    parser.add_argument("--frozen", action="store_true", help="are these the released ones?")
    options = parser.parse_args()
    repository = Path(__file__).resolve().parents[1]
    if options.freeze:
        return freeze(repository)
    if options.frozen:
        if is_frozen(repository):
            return 0
        sys.stderr.write("the protos are not those in released/: make proto-release\n")
        return 1
    return compare(repository, options.against or find_newest_release(repository))


if __name__ == "__main__":
    sys.exit(main())
