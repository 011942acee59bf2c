"""What every command waits for: the program starts without the packages that few commands need."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_modules import IMPORT_COMMANDS

# Each takes a tenth of a second or more to import.
_HEAVY = (
    "aiohttp",
    "duckdb",
    "jinja2",
    "kubernetes",
    "lightgbm",
    "numba",
    "opentelemetry",
    "pandas",
    "prometheus_client",
    "ray",
    "scipy",
    "torch",
    "transformers",
)
_GRPC = ("grpc", "google.protobuf")
# What estimates of single operators need nothing of; each takes a thirtieth to a tenth of a second.
_NOT_OF_ESTIMATES = (
    "foretoken.domain.lowering",
    "foretoken.domain.metrics.registry",
    "foretoken.domain.ports",
    "foretoken.domain.requests.scenario",
    "foretoken.predictor.training_rows",
    "pyarrow.compute",
    "pydantic",
)
_NUMERIC = ("numpy", "pyarrow")
_MEMORY = "memory --model llama-2-7b --device a100_sxm_80 --layout tp=2,pp=4,dp=2"

# Runs a command as the program does, then tells which of the packages it has imported.
_PROGRAM = """
import json, sys
from foretoken.app.cli.main import main
status = 0
try:
    main()
except SystemExit as end:
    status = end.code or 0
loaded = [name for name in json.loads(sys.stdin.read()) if name in sys.modules]
print(json.dumps([status, loaded]), file=sys.stderr)
"""


def test_no_command_waits_for_what_only_some_need() -> None:
    code = f"{IMPORT_COMMANDS}\nprint(*[name for name in {_HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [] == done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "packages"),
    [
        ("--version", (*_NUMERIC, *_GRPC, "yaml", "rich", "foretoken.domain")),
        ("--help", (*_NUMERIC, *_GRPC, "yaml", "foretoken.domain")),
        ("search --help", (*_NUMERIC, *_GRPC)),
        ("search training --help", (*_NUMERIC, *_GRPC)),
        ("simulate training --help", (*_NUMERIC, *_GRPC)),
        ("predict --help", (*_NUMERIC, *_GRPC)),
        ("list models", (*_NUMERIC, *_GRPC)),
        (_MEMORY, ("pyarrow", *_GRPC)),
    ],
)
def test_a_light_command_imports_little(
    words: str, packages: Sequence[str], tmp_path: Path
) -> None:
    """Help, names and arithmetic do not wait for what moves and learns from data."""
    command = [sys.executable, "-c", _PROGRAM, "--home", str(tmp_path), *words.split()]
    done = subprocess.run(
        command, input=json.dumps((*packages, *_HEAVY)), capture_output=True, text=True, check=True
    )
    assert [0, []] == json.loads(done.stderr.splitlines()[-1])
    assert done.stdout != ""
    assert [] == list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_estimate_without_a_model_does_not_wait_for_what_learns(tmp_path: Path) -> None:
    """The catalog is looked at; regression, and what only some answers need, is not loaded."""
    words = "predict gemm m=8 n=8 k=8 dtype=fp16 --device a30"
    command = [sys.executable, "-c", _PROGRAM, "--home", str(tmp_path), *words.split()]
    packages = json.dumps((*_HEAVY, *_NOT_OF_ESTIMATES))
    done = subprocess.run(command, input=packages, capture_output=True, text=True, check=True)
    assert [0, ["duckdb"]] == json.loads(done.stderr.splitlines()[-1])


@pytest.mark.slow
def test_an_estimate_by_a_kept_model_does_not_wait_for_what_trained_it(tmp_path: Path) -> None:
    """The first answer of a new home trains a model of the starter; the next ones read it."""
    words = "predict gemm m=8 n=4096 k=4096 dtype=bf16 --device h200_sxm"
    command = [sys.executable, "-c", _PROGRAM, "--home", str(tmp_path), *words.split()]
    starter = Path(__file__).resolve().parents[2] / "starter" / "src" / "foretoken_starter" / "data"
    environment = {**os.environ, "FORETOKEN_PREDICTOR__STARTER": repr(str(starter))}
    loaded = []
    for _ in range(2):
        done = subprocess.run(
            command,
            input=json.dumps((*_HEAVY, *_NOT_OF_ESTIMATES)),
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        loaded.append(json.loads(done.stderr.splitlines()[-1]))
    assert "lightgbm" in loaded[0][1]
    assert [0, ["duckdb"]] == loaded[1]


@pytest.mark.slow
def test_a_training_step_waits_for_nothing_of_serving(tmp_path: Path) -> None:
    """No numba; and no pandas, which Arrow imports to tell whether a list is one of its own."""
    words = "--no-starter simulate training docs/examples/training.yaml"
    command = [sys.executable, "-c", _PROGRAM, "--home", str(tmp_path), *words.split()]
    done = subprocess.run(
        command, input=json.dumps(_HEAVY), capture_output=True, text=True, check=True
    )
    assert [0, ["duckdb"]] == json.loads(done.stderr.splitlines()[-1])


def test_a_shell_completes_commands_without_importing_them() -> None:
    """A completion comes between two keys."""
    environment = {
        "_FORETOKEN_COMPLETE": "complete_bash",
        "COMP_WORDS": "foretoken search ",
        "COMP_CWORD": "2",
    }
    code = _PROGRAM.replace("main()", "sys.argv[0] = 'foretoken'; main()", 1)
    packages = json.dumps(("rich", "yaml", *_NUMERIC, *_GRPC, *_HEAVY))
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=packages, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ["serving", "capacity", "training", "internevo"] == done.stdout.split()
    assert [0, []] == json.loads(done.stderr.splitlines()[-1])
