"""`catalog install` and `catalog publish`: what others measured, brought in and handed on."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app

Run = Callable[..., Result]
_PLACE = "systems/data/h200_sxm/gemm/vllm/0.24.0"
_ROW = {"gemm_dtype": "bfloat16", "n": 8, "k": 16, "kernel_source": "cublas", "latency": 0.5}

_MEASURED = (
    "id,backend,backend_version,model_path,system,mode,isl,osl,gemm_quant_mode,moe_quant_mode,"
    "batch_size,tp_size,pp_size,attention_dp_size,moe_tp_size,moe_ep_size,silicon_ttft_ms,"
    "silicon_tpot_ms\n"
    "a,vllm,0.19.0,meta-llama/Llama-3.2-1B,h200_sxm,agg,64,8,x,x,2,1,1,,1,1,20,5\n"
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a command's caller, each with a catalog by name."""

    def invoke(home: str, *words: object) -> Result:
        return CliRunner().invoke(
            app, ["--home", str(tmp_path / home), *map(str, words)], env={"COLUMNS": "200"}
        )

    return invoke


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    table = tmp_path / "gemm_perf.parquet"
    parquet.write_table(pa.Table.from_pylist([{**_ROW, "m": m} for m in range(3)]), table)
    path = tmp_path / "aisimulate-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(table, f"{_PLACE}/gemm_perf.parquet")
        archive.write(table, f"{_PLACE}/other_perf.parquet")
        archive.writestr("aisimulate_core/systems/silicon_sample.csv", _MEASURED)
        archive.writestr("a-1.dist-info/METADATA", "Name: aisimulate\nVersion: 1\nLicense: Free\n")
    return path


def test_what_is_in_the_wheel_is_said_and_stored(run: Run, wheel: Path) -> None:
    """Rows by device first; then those recorded, kept as they are, and left out with the reason."""
    result = run("one", "catalog", "install", "nvidia", "--wheel", wheel)
    assert result.exit_code == 0, result.output
    for text in ("aisimulate 1, licence Free", "h200_sxm: 6 rows", "gemm: m is below 1"):
        assert text in result.output
    assert "raw_table" in run("one", "catalog", "artifacts").output
    assert "gemm" in run("one", "catalog", "coverage").output


def test_what_was_published_is_installed_elsewhere(run: Run, wheel: Path, tmp_path: Path) -> None:
    assert 0 == run("one", "catalog", "install", "nvidia", "--wheel", wheel).exit_code
    folder = tmp_path / "published"
    result = run("one", "catalog", "publish", folder)
    assert result.exit_code == 0, result.output
    assert 0 == run("two", "catalog", "install", folder).exit_code
    assert "h200_sxm" in run("two", "catalog", "coverage").output


def test_measured_runs_are_kept_and_a_home_is_compared_with_them(run: Run, wheel: Path) -> None:
    assert 0 == run("one", "catalog", "install", "nvidia", "--wheel", wheel).exit_code
    against = ("validate", "serving", "--against", "installed")
    result = run("one", *against, "--model", "llama-3.2-1b")
    assert result.exit_code == 0, result.output
    assert "llama-3.2-1b" in result.output
    refused = run("one", *against, "--model", "qwen3-32b")
    assert (2, True) == (refused.exit_code, "no measured runs" in refused.output)


def test_a_stub_ends_the_command(run: Run, tmp_path: Path) -> None:
    stub = tmp_path / "aisimulate-2-py3-none-any.whl"
    with zipfile.ZipFile(stub, "w") as archive:
        archive.writestr("a-2.dist-info/METADATA", "Name: aisimulate\nVersion: 2\n")
    result = run("one", "catalog", "install", "nvidia", "--wheel", stub)
    assert (1, True) == (result.exit_code, "is a stub without tables" in result.output)
