# ruff: noqa: INP001, T201 - a program, not a part of the package
"""Does what the Dockerfile does, without Docker: `python deploy/build_image.py simulator`.

Each stage that the image needs is a folder of files under `--into`. Copies are made and commands
run there by this machine's Python, their paths moved into it. What needs a base image and its root
(apt, users) is left out, and named.

What is made is looked at: how large it is and by which packages, that nothing in it compiles, that
its user is not root, that its program starts. Its parts are listed in `sbom.json` (CycloneDX).
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import Distribution, distributions
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = "opt/foretoken"
# Needs the base image, and the rights of its root.
_OF_THE_BASE = re.compile(r"\b(apt-get|groupadd|useradd)\b")
# Absolute paths of an image, in a command or a value.
_OF_AN_IMAGE = re.compile(r"(?<![\w.$/-])/(?=(opt|src|var/lib/foretoken)\b)")
_COMPILERS = {"gcc", "g++", "cc", "clang", "ld", "nvcc", "rustc", "go"}
_MB = 1e6
_NUM_LARGEST = 12
# Source: https://cyclonedx.org/docs/1.6/json/
_SBOM_VERSION = "1.6"


class BuildError(Exception):
    """Why there is no image; the message says what to do."""


@dataclass(frozen=True)
class Instruction:
    """One line of a Dockerfile, continuations joined."""

    name: str
    rest: str


@dataclass
class Stage:
    """One image of a Dockerfile: its name, and what it is left with."""

    name: str
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    work_folder: str = "/"
    user: str = "root"
    entry: tuple[str, ...] = ()
    left_out: list[str] = field(default_factory=list)


def read_dockerfile(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        name, _, rest = line.strip().partition(" ")
        found.append(Instruction(name.upper(), rest.strip()))
    return found


def _name_of_stage(one: Instruction, number: int) -> str:
    words = one.rest.split()
    return words[2] if len(words) > 1 and words[1].upper() == "AS" else str(number)


def read_stages(instructions: Sequence[Instruction]) -> Mapping[str, Sequence[Instruction]]:
    """Return the instructions of each stage by its name, or its number."""
    stages: dict[str, list[Instruction]] = {}
    for one in instructions:
        if one.name == "FROM":
            stages[_name_of_stage(one, len(stages))] = own = []
        own.append(one)
    return stages


def images(instructions: Sequence[Instruction]) -> list[str]:
    """Return the stages that start something; the others are on the way to them."""
    stages = read_stages(instructions)
    return [name for name, own in stages.items() if any(one.name == "ENTRYPOINT" for one in own)]


def needed_for(target: str, instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return the instructions of a stage and of those that it is based on or copies from."""
    stages = read_stages(instructions)
    needed, left = set[str](), [target]
    while left:
        name = left.pop()
        needed.add(name)
        named = (
            one.rest.split()[0].removeprefix("--from=")
            for one in stages[name]
            if one.name in ("FROM", "COPY")
        )
        left += [other for other in named if other in stages and other not in needed]
    return [one for name, own in stages.items() if name in needed for one in own]


class Builder:
    """Follows the instructions, a folder for each stage."""

    def __init__(self, context: Path, into: Path, arguments: Mapping[str, str]) -> None:
        """Keep what is copied from, and to, and the values of ARGs."""
        self._context = context
        self._into = into
        self._arguments = arguments
        self.stages: list[Stage] = []

    def build(self, instructions: Sequence[Instruction]) -> Stage:
        """Do all of it, and return the last stage.

        Raises:
            BuildError: a command fails, or an instruction is not known here.

        """
        for one in instructions:
            action = getattr(self, f"_{one.name.lower()}", None)
            if action is None:
                raise BuildError(f"no rule for {one.name}: {one.rest}")
            action(one.rest)
        return self.stages[-1]

    @property
    def _stage(self) -> Stage:
        return self.stages[-1]

    def _from(self, rest: str) -> None:
        name = _name_of_stage(Instruction("FROM", rest), len(self.stages))
        folder = self._into / name
        shutil.rmtree(folder, ignore_errors=True)
        base = next(
            (stage for stage in self.stages if stage.name == rest.split(maxsplit=1)[0]), None
        )
        if base is None:
            folder.mkdir(parents=True)
            self.stages.append(Stage(name, folder))
            return
        shutil.copytree(base.folder, folder, symlinks=True)
        variables, left_out = dict(base.variables), [*base.left_out]
        self.stages.append(
            replace(base, name=name, folder=folder, variables=variables, left_out=left_out)
        )

    def _arg(self, rest: str) -> None:
        name, _, default = rest.partition("=")
        self._stage.variables[name] = self._arguments.get(name, default)

    def _env(self, rest: str) -> None:
        for word in shlex.split(rest):
            name, _, value = word.partition("=")
            self._stage.variables[name] = self._expand(value)

    def _workdir(self, rest: str) -> None:
        self._stage.work_folder = rest
        self._place(rest).mkdir(parents=True, exist_ok=True)

    def _copy(self, rest: str) -> None:
        words = rest.split()
        source = self._context
        # As .dockerignore says of the context.
        ignored = shutil.ignore_patterns("__pycache__", "node_modules")
        if words[0].startswith("--from="):
            ignored = None
            name = words.pop(0).removeprefix("--from=")
            source = next(stage.folder for stage in self.stages if stage.name == name)
        *names, target = words
        folder = self._place(target)
        for name in names:
            found = source / name.lstrip("/")
            is_folder = found.is_dir()
            place = folder / found.name if target.endswith("/") and not is_folder else folder
            place.parent.mkdir(parents=True, exist_ok=True)
            if is_folder:
                shutil.copytree(found, place, symlinks=True, dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copy2(found, place)

    def _run(self, rest: str) -> None:
        stage = self._stage
        if _OF_THE_BASE.search(rest):
            stage.left_out.append(rest)
            return
        print(f"[{stage.name}] {rest[:100]}", flush=True)
        known = {"PATH": os.environ["PATH"], "HOME": str(stage.folder)}
        # Where packages come from is this machine's business.
        known |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        variables = {key: self._moved(value) for key, value in stage.variables.items()}
        if "PATH" in variables:
            variables["PATH"] = variables["PATH"].replace("$PATH", known["PATH"])
        command = ["/bin/sh", "-ec", self._moved(rest)]
        done = subprocess.run(  # noqa: S603 - of our own Dockerfile
            command, check=False, cwd=self._place(stage.work_folder), env=known | variables
        )
        if done.returncode:
            raise BuildError(f"status {done.returncode} of: {rest}")

    def _user(self, rest: str) -> None:
        self._stage.user = rest

    def _entrypoint(self, rest: str) -> None:
        self._stage.entry = tuple(json.loads(rest))

    def _volume(self, rest: str) -> None:
        """Do nothing: what is mounted there is no part of the image."""

    def _expose(self, rest: str) -> None:
        """Do nothing: ports say what the program listens on."""

    def _expand(self, text: str) -> str:
        variables = self._stage.variables
        return re.sub(r"\$(\w+)", lambda m: variables.get(m[1], m[0]), text)

    def _place(self, path: str) -> Path:
        within = path if path.startswith("/") else f"{self._stage.work_folder}/{path}"
        return self._stage.folder / within.lstrip("/")

    def _moved(self, text: str) -> str:
        """Return a command, or a value, whose absolute paths of an image lie in the folder."""
        return _OF_AN_IMAGE.sub(f"{self._stage.folder}/", text)


def size_of(folder: Path) -> int:
    """Return the bytes of all files under a folder."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)


def packed_size_of(folder: Path) -> int:
    """Return the bytes that registries keep of a folder: a tar file, compressed with gzip."""
    with TemporaryFile() as file:
        # The level that Docker compresses with.
        with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as packed:
            packed.add(folder)
        return file.tell()


def find_distributions(folder: Path) -> list[Distribution]:
    """Return what is installed under a folder, by name."""
    places = [str(path) for path in folder.glob("lib/python*/site-packages")]
    found = {one.metadata["Name"]: one for one in distributions(path=places)}
    return [found[name] for name in sorted(found, key=str.lower)]


def size_of_distribution(one: Distribution) -> int:
    """Return the bytes of its files."""
    places = (Path(str(file.locate())) for file in one.files or ())
    return sum(place.stat().st_size for place in places if place.is_file())


def build_sbom(name: str, version: str, installed: Sequence[Distribution]) -> Mapping[str, Any]:
    """Return the list of parts as CycloneDX has it."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": _SBOM_VERSION,
        "version": 1,
        "metadata": {"component": {"type": "container", "name": name, "version": version}},
        "components": [_component(one) for one in installed],
    }


def _component(one: Distribution) -> Mapping[str, Any]:
    name, version = one.metadata["Name"], one.version
    url_name = re.sub(r"[-_.]+", "-", name).lower()
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{url_name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{url_name}@{version}",
    }
    expression = one.metadata.get("License-Expression")
    classified = [
        text.rpartition(" :: ")[2]
        for text in one.metadata.get_all("Classifier") or ()
        if text.startswith("License :: ")
    ]
    if expression:
        component["licenses"] = [{"expression": expression}]
    elif classified:
        component["licenses"] = [{"license": {"name": text}} for text in classified]
    return component


def find_faults(stage: Stage) -> Iterator[str]:
    """Yield what an image should not be."""
    if stage.user.split(":")[0] in {"root", "0"}:
        yield "its user is root"
    programs = {path.name for path in (stage.folder / _PACKAGES / "bin").glob("*")}
    if compilers := sorted(_COMPILERS & programs):
        yield f"it can compile: {', '.join(compilers)}"
    if not stage.entry:
        yield "it starts nothing"


def _describe(service: str, stage: Stage) -> list[str]:
    """Print what was made, write its parts, and return its faults."""
    folder = stage.folder / _PACKAGES
    installed = find_distributions(folder)
    version = next(one.version for one in installed if one.metadata["Name"] == "foretoken")
    sbom = build_sbom(f"foretoken-{service}", version, installed)
    place = stage.folder.parent / "sbom.json"
    place.write_text(json.dumps(sbom, indent=1) + "\n", encoding="utf-8")
    sizes = [(size_of_distribution(one), one.metadata["Name"]) for one in installed]
    print(f"{size_of(folder) / _MB:8.1f} MB  foretoken-{service} {version} above its base")
    print(f"{packed_size_of(folder) / _MB:8.1f} MB  of it as registries keep it, compressed")
    for size, name in sorted(sizes, reverse=True)[:_NUM_LARGEST]:
        print(f"{size / _MB:8.1f} MB  {name}")
    print(f"{len(installed)} distributions in {place}")
    for left in stage.left_out:
        print(f"left to a base image: {left}")
    return [*find_faults(stage), *_start(stage)]


def _start(stage: Stage) -> Iterator[str]:
    """Yield that the program does not start, where it does not."""
    python = stage.folder / _PACKAGES / "bin" / "python"
    command = [str(python), "-m", "foretoken.app", "--version"]
    done = subprocess.run(  # noqa: S603 - what was just built
        command, capture_output=True, text=True, check=False
    )
    print(done.stdout.strip())
    if done.returncode:
        yield f"it does not start: {done.stderr.strip()[-300:]}"


def main() -> None:
    """Build the image of a service, and look at it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    instructions = read_dockerfile((_ROOT / "deploy/Dockerfile").read_text(encoding="utf-8"))
    parser.add_argument("service", choices=images(instructions))
    parser.add_argument("--into", type=Path, help="folder of the stages; dist/images/SERVICE")
    parser.add_argument("--build-arg", action="append", default=[], help="NAME=VALUE of an ARG")
    given = parser.parse_args()
    arguments = dict(word.split("=", 1) for word in given.build_arg)
    into = (given.into or _ROOT / "dist" / "images" / given.service).resolve()
    try:
        stage = Builder(_ROOT, into, arguments).build(needed_for(given.service, instructions))
    except BuildError as err:
        sys.exit(str(err))
    if faults := _describe(given.service, stage):
        sys.exit("; ".join(faults))


if __name__ == "__main__":
    main()
