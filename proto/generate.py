# ruff: noqa: INP001 - a script next to the protos, not a package
"""Generate the Python stubs from the protos: `python proto/generate.py [folder]`.

The versions of grpcio-tools and mypy-protobuf are pinned in pyproject.toml, because stubs refuse to
run with a grpcio older than the one that made them. A test compares the committed stubs with these.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
# Next to the stubs, for what describes the services at run time.
COMMENTS = "comments.json"
STUBS = ROOT.parent / "clients" / "python" / "gen"


def generate(target: Path) -> None:
    """Write the stubs of all protos under `target`, in place of those that are there."""
    shutil.rmtree(target / "foretoken" / "api", ignore_errors=True)
    target.mkdir(parents=True, exist_ok=True)
    sources = sorted(str(path) for path in (ROOT / "foretoken").rglob("*.proto"))
    # The plug-ins are next to the interpreter, which need not be on PATH.
    scripts = Path(sys.executable).parent
    arguments = [
        "protoc",
        f"--proto_path={ROOT}",
        f"--proto_path={files('grpc_tools').joinpath('_proto')}",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        f"--python_out={target}",
        f"--grpc_python_out={target}",
        f"--mypy_out=quiet:{target}",
        f"--mypy_grpc_out=quiet:{target}",
    ]
    _run([*arguments, *sources])
    comments = json.dumps(dict(sorted(_comments(sources))), ensure_ascii=False, indent=0)
    (target / "foretoken" / "api" / COMMENTS).write_text(f"{comments}\n", encoding="utf-8")
    # Files without a service get an empty stub, which nobody imports.
    for path in target.rglob("*_pb2_grpc.py*"):
        if not path.name.startswith(tuple(_services())):
            path.unlink()


def _run(arguments: list[str]) -> None:
    status = protoc.main(arguments)
    if status:
        raise SystemExit(status)


def _comments(sources: list[str]) -> Iterator[tuple[str, str]]:
    """Yield what the protos say of everything by its full name: stubs have no comments."""
    with tempfile.NamedTemporaryFile() as written:
        _run(
            [
                "protoc",
                f"--proto_path={ROOT}",
                f"--proto_path={files('grpc_tools').joinpath('_proto')}",
                "--include_source_info",
                f"--descriptor_set_out={written.name}",
                *sources,
            ]
        )
        found = FileDescriptorSet.FromString(Path(written.name).read_bytes())
    for file in found.file:
        for location in file.source_code_info.location:
            text = " ".join(location.leading_comments.split())
            if text and (name := _name(file, list(location.path))):
                yield f"{file.package}.{name}", text


def _name(place: Any, path: list[int]) -> str:
    """Return the name below its file of what a path of field numbers and places leads to."""
    names = []
    for number, index in zip(path[::2], path[1::2], strict=False):
        place = getattr(place, place.DESCRIPTOR.fields_by_number[number].name)[index]
        names.append(place.name)
    return ".".join(names)


def _services() -> list[str]:
    return [path.stem for path in (ROOT / "foretoken").rglob("*_service.proto")]


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else STUBS)
