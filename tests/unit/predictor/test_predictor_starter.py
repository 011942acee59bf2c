"""A starter catalog answers where nothing was measured, and steps back where something was."""

import gzip
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from predictor_fakes import FakeCatalog, MakePredictor, Rows, columns_of, gemm_rows
from pyarrow import parquet

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
    Provenance,
)
from foretoken.domain.results.report import PredictorTrainingReport
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.model_store import write_models
from foretoken.predictor.series import SeriesKey
from foretoken.predictor.service import PredictorService
from foretoken.predictor.starter import (
    INDEX_NAME,
    PRIOR_NAME,
    TUNING_NAME,
    StarterEntry,
    StarterSeries,
    write_index,
)
from foretoken.predictor.trainer import tune
from foretoken.predictor.tuning import write_tunings

_VLLM = SeriesKey("gemm", "a30", "", "fp16", "forward", "vllm 0.24.0")
_SGLANG = SeriesKey("gemm", "a30", "", "fp16", "forward", "sglang 0.5.14")
_FILE = "device=a30/operator=gemm/part-0.parquet"
_SIZES = (256, 512, 1024, 2048)
_POINT = {"m": 512, "n": 1024, "k": 2048}
# µs of every call: what the starter's software measured, and what was measured here.
_VLLM_US, _SGLANG_US = 1000.0, 1500.0


@pytest.fixture
def starter(tmp_path: Path) -> Path:
    """Two frameworks' GEMMs on the A30, one after the other in a file."""
    folder = tmp_path / "starter"
    points = np.array([(m, n, k) for m in _SIZES for n in _SIZES for k in _SIZES])
    columns = {name: np.tile(points[:, place], 2) for place, name in enumerate("mnk")}
    times = np.repeat([_VLLM_US, _SGLANG_US], len(points))
    path = folder / _FILE
    path.parent.mkdir(parents=True)
    parquet.write_table(pa.table({**columns, "latency_us_median": times}), path)
    entries = [
        StarterEntry(
            key=key,
            kernels=("cutlass",),
            num_points=len(points),
            noise_log=0.01,
            file=_FILE,
            first=first,
        )
        for key, first in ((_VLLM, 0), (_SGLANG, len(points)))
    ]
    write_index(folder, entries)
    (folder / PRIOR_NAME).write_bytes(write_models(ModelSet()))
    return folder


@pytest.fixture
def make_service(starter: Path, tmp_path: Path) -> Iterator[MakePredictor]:
    """Return a function that opens a predictor over rows, with the starter behind them."""
    with ExitStack() as opened:

        def make(rows: Rows) -> PredictorService:
            config = PredictorConfig(state_folder=str(tmp_path / "state"), starter=str(starter))
            service = PredictorService(config, FakeCatalog(rows))
            service.open()
            opened.callback(service.close)
            return service

        yield make


def _ask(service: PredictorService, **asked: str) -> LatencyReply:
    table = OperatorTable(operator="gemm", dtype=DType.FP16, columns=columns_of(_POINT))
    return service.predict(LatencyQuery(device="a30", tables=(table,), **asked))


def _latency_us(reply: LatencyReply) -> float:
    return float(reply.tables[0].latency_us[0])


def test_an_empty_catalog_answers_from_the_starter(make_service: MakePredictor) -> None:
    """Of software that is asked for by name, and of all together; the version says so."""
    service = make_service([])
    reply = _ask(service, framework="sglang")
    assert "starter" == reply.model_version
    assert [Provenance.MEASURED.value] == reply.tables[0].provenance.tolist()
    assert "of the starter catalog" in reply.tables[0].basis
    assert _SGLANG_US == pytest.approx(_latency_us(reply), rel=0.01)
    assert _VLLM_US == pytest.approx(_latency_us(_ask(service, framework="vllm")), rel=0.01)
    again = _ask(service, framework="sglang", model_version="starter")
    assert _latency_us(reply) == _latency_us(again)


def test_own_measurements_come_first(
    make_service: MakePredictor, train: Callable[..., PredictorTrainingReport]
) -> None:
    """Also where the starter has the very software that is asked for."""
    service = make_service(gemm_rows())
    report = train(service)
    reply = _ask(service, preferred_framework="vllm 0.24.0")
    assert f"{report.model_version}+starter" == reply.model_version
    assert "starter" not in reply.tables[0].basis
    assert _latency_us(reply) < _VLLM_US / 2
    assert [report.model_version] == [model.version for model in service.list_models()]
    again = _ask(service, model_version=reply.model_version)
    assert _latency_us(reply) == pytest.approx(_latency_us(again))


@pytest.mark.parametrize(
    ("asked", "is_starter"),
    [("pytorch", True), ("sglang 0.5.14", True), ("sglang 0.5.20", True), ("trtllm", False)],
)
def test_of_quite_another_software_own_measurements_come_after_its_own(
    make_service: MakePredictor,
    train: Callable[..., PredictorTrainingReport],
    asked: str,
    is_starter: bool,
) -> None:
    """SGLang's products in 16 bit were measured as PyTorch's; TensorRT-LLM's nowhere."""
    service = make_service(gemm_rows(framework="vllm", framework_version="0.24.0"))
    train(service)
    reply = _ask(service, preferred_framework=asked)
    assert is_starter == ("sglang 0.5.14) of the starter" in reply.tables[0].basis)
    assert is_starter == (_latency_us(reply) == pytest.approx(_SGLANG_US, rel=0.01))


@pytest.mark.parametrize(("kernel", "is_starter"), [("wmma", False), ("cutlass", True)])
def test_of_other_code_own_measurements_come_first(
    make_service: MakePredictor,
    train: Callable[..., PredictorTrainingReport],
    kernel: str,
    is_starter: bool,
) -> None:
    """The starter answers only where it has the code that is asked for."""
    service = make_service(gemm_rows())
    train(service)
    table = OperatorTable(
        operator="gemm",
        dtype=DType.FP16,
        columns=columns_of(_POINT),
        kernel=kernel,
        tentative=True,
    )
    reply = service.predict(LatencyQuery(device="a30", tables=(table,)))
    assert is_starter == ("starter" in reply.tables[0].basis)


def test_a_model_is_trained_once_for_all_processes(starter: Path, tmp_path: Path) -> None:
    """The second finds it; what is damaged is trained anew."""
    config = PredictorConfig(state_folder=str(tmp_path))
    kept = tmp_path / "kept"
    first = StarterSeries(starter, kept, config)
    report = first[_VLLM].report
    (path,) = kept.rglob("*.series")
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    assert report == StarterSeries(starter, kept, config)[_VLLM].report
    assert content == path.read_bytes()
    modified = path.stat().st_mtime_ns
    assert report == StarterSeries(starter, kept, config)[_VLLM].report
    assert modified == path.stat().st_mtime_ns


def test_what_leaving_points_out_taught_is_taken_from_the_starter(
    starter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same model without leaving any out; a damaged file is as none."""
    config = PredictorConfig(state_folder=str(tmp_path))
    taught = StarterSeries(starter, tmp_path / "taught", config)
    full = taught.train(_VLLM)
    doubled = replace(tune(full), calibration=replace(full.calibration, tier_log=np.full(5, 0.5)))
    tunings = write_tunings({taught.heads[_VLLM].content_hash: doubled})
    (starter / TUNING_NAME).write_bytes(tunings)
    told = StarterSeries(starter, tmp_path / "kept", config)[_VLLM]
    assert [0.5] * 5 == told.calibration.tier_log.tolist()
    (starter / TUNING_NAME).write_bytes(tunings[:-9])
    alone = StarterSeries(starter, tmp_path / "alone", config)[_VLLM]
    assert full.calibration.tier_log.tolist() == alone.calibration.tier_log.tolist()
    assert "_tuning.bin cannot be read" in caplog.text
    design = full.series.design
    tiers = np.zeros(design.num_rows, dtype=np.int64)
    answers = [model.regressor.predict(design, tiers).log_ratio for model in (full, told)]
    np.testing.assert_allclose(*answers, atol=1e-6)


def test_points_are_those_of_their_rows(starter: Path, tmp_path: Path) -> None:
    series = StarterSeries(starter, tmp_path, PredictorConfig(state_folder=""))
    assert len(_SIZES) ** 3 == series.read_series(_SGLANG).num_points
    assert {_SGLANG_US} == set(series.read_series(_SGLANG).latency_us)
    assert 0.01 == series.read_series(_VLLM).noise_log


def test_a_folder_without_an_index_is_no_starter(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no starter catalog"):
        StarterSeries(tmp_path, tmp_path, PredictorConfig(state_folder=""))
    (tmp_path / INDEX_NAME).write_bytes(gzip.compress(b"[]"))
    assert {} == StarterSeries(tmp_path, tmp_path, PredictorConfig(state_folder="")).heads
