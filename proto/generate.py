# ruff: noqa: INP001 - a script next to the protos, not a package
"""Generate the Python stubs from the protos: `python proto/generate.py [folder]`.

The versions of grpcio-tools and mypy-protobuf are pinned in pyproject.toml, because stubs refuse to
run with a grpcio older than the one that made them. A test compares the committed stubs with these.
"""

import shutil
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
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
        *sources,
    ]
    status = protoc.main(arguments)
    if status:
        raise SystemExit(status)
    # Files without a service get an empty stub, which nobody imports.
    for path in target.rglob("*_pb2_grpc.py*"):
        if not path.name.startswith(tuple(_services())):
            path.unlink()


def _services() -> list[str]:
    return [path.stem for path in (ROOT / "foretoken").rglob("*_service.proto")]


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else STUBS)
