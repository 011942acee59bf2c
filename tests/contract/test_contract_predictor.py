"""The predictor behaves alike whether it is embedded or remote."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from contract_reach import Reach
from contract_rows import make_rows, make_run

from foretoken.catalog.service import CatalogService
from foretoken.client.facade import Foretoken
from foretoken.client.services import PredictorClient
from foretoken.domain.errors import (
    InvalidRequestError,
    OutOfCoverageError,
    UnknownDeviceError,
    UnknownJobError,
    UnknownOperatorError,
)
from foretoken.domain.job import JobState
from foretoken.domain.measurements.estimate import DType, LatencyQuery, OperatorTable, Provenance
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.measurements.measurement import MeasurementBatch
from foretoken.domain.ports import PredictorPort
from foretoken.predictor import servicer
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.service import PredictorService


@contextmanager
def _opened(folder: Path, catalog: CatalogService, reach: Reach) -> Iterator[PredictorPort]:
    service = PredictorService(PredictorConfig(state_folder=str(folder / "p")), catalog)
    service.open()
    yield reach(service, servicer.register, PredictorClient.connect)
    service.close()


@pytest.fixture
def port(tmp_path: Path, catalog: CatalogService, reach: Reach) -> Iterator[PredictorPort]:
    with _opened(tmp_path, catalog, reach) as port:
        yield port


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, shared_catalog: CatalogService, shared_reach: Reach
) -> Iterator[PredictorPort]:
    """One for all who only ask."""
    with _opened(tmp_path_factory.mktemp("trained"), shared_catalog, shared_reach) as port:
        batch = MeasurementBatch(batch_index=0, rows=make_rows(_SIZES), is_last=True)
        list(shared_catalog.record(make_run(), [batch]))
        job = port.create_training(TrainRequest())
        assert list(port.watch_job(job.job_id))[-1].state is JobState.SUCCEEDED
        yield port


_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def _gemms(sizes: list[int], **changes: object) -> LatencyQuery:
    m = np.array(sizes, dtype=np.int64)
    full = np.full(len(sizes), 4096, dtype=np.int64)
    table = OperatorTable(operator="gemm", dtype=DType.BF16, columns={"m": m, "n": full, "k": full})
    return LatencyQuery(**{"device": "a30", "tables": (table,), **changes})


def test_training_makes_the_active_model(trained: PredictorPort) -> None:
    (model,) = trained.list_models()
    assert model.is_active
    assert model.num_rows == len(_SIZES)
    assert trained.predict(_gemms([8])).model_version == model.version


def test_the_training_report_outlives_the_job(trained: PredictorPort) -> None:
    (job,) = trained.list_jobs()
    report = trained.get_training_report(job.job_id)
    assert report.model_version == trained.list_models()[0].version
    assert report.num_rows == len(_SIZES)
    assert [(entry.operator, entry.device) for entry in report.operators] == [("gemm", "a30")]


def test_a_measured_point_is_said_to_be_measured(trained: PredictorPort) -> None:
    columns = trained.predict(_gemms([8, 12])).tables[0]
    assert columns.provenance[0] == Provenance.MEASURED.value
    assert columns.provenance[1] != Provenance.MEASURED.value


def test_an_estimate_lies_inside_its_interval(trained: PredictorPort) -> None:
    columns = trained.predict(_gemms([1, 7, 8, 100, 100_000])).tables[0]
    assert (np.asarray(columns.low_us) <= columns.latency_us).all()
    assert (np.asarray(columns.latency_us) <= columns.high_us).all()


def test_tables_are_answered_in_order(trained: PredictorPort) -> None:
    """Two tables of different sizes, one of them empty, one beyond the plain columns' limit."""
    sizes = [[512], [], list(range(1, 1_501))]
    tables = tuple(_gemms(part).tables[0] for part in sizes)
    reply = trained.predict(LatencyQuery(device="a30", tables=tables))
    assert [len(table.latency_us) for table in reply.tables] == [1, 0, 1_500]
    one_by_one = [trained.predict(_gemms([m])).tables[0].latency_us[0] for m in (1, 8, 1_500)]
    together = [reply.tables[2].latency_us[m - 1] for m in (1, 8, 1_500)]
    assert one_by_one == pytest.approx(together, rel=1e-9)


def test_a_query_without_tables_has_an_empty_answer(trained: PredictorPort) -> None:
    assert trained.predict(LatencyQuery(device="a30", tables=())).tables == ()


def test_an_untrained_predictor_answers_from_the_roofline(port: PredictorPort) -> None:
    columns = port.predict(_gemms([1, 4096])).tables[0]
    assert list(columns.provenance) == [Provenance.ANALYTICAL.value] * 2
    assert 0 < columns.latency_us[0] < columns.latency_us[1]


@pytest.mark.parametrize(
    ("query", "error"),
    [
        (_gemms([8], device="a31"), UnknownDeviceError),
        (
            LatencyQuery(
                device="a30",
                tables=(OperatorTable(operator="gem", dtype=DType.BF16, columns={"m": [1]}),),
            ),
            UnknownOperatorError,
        ),
        (
            LatencyQuery(
                device="a30",
                tables=(OperatorTable(operator="gemm", dtype=DType.BF16, columns={"m": [1]}),),
            ),
            InvalidRequestError,
        ),
    ],
    ids=["device", "operator", "dimensions"],
)
def test_a_query_that_names_nothing_known_is_refused(
    query: LatencyQuery, error: type[Exception], port: PredictorPort
) -> None:
    with pytest.raises(error):
        port.predict(query)


def test_extrapolation_can_be_refused(trained: PredictorPort) -> None:
    with pytest.raises(OutOfCoverageError):
        trained.predict(_gemms([1_000_000], refuse_extrapolation=True))


def test_training_on_nothing_fails_with_what_to_do(port: PredictorPort) -> None:
    job = port.create_training(TrainRequest())
    last = list(port.watch_job(job.job_id))[-1]
    assert last.state is JobState.FAILED
    with pytest.raises(InvalidRequestError, match="import measurements"):
        port.get_training_report(job.job_id)


def test_training_for_an_unknown_device_is_refused_at_once(port: PredictorPort) -> None:
    with pytest.raises(UnknownDeviceError):
        port.create_training(TrainRequest(device="a31"))


def test_an_unknown_job_is_not_found(port: PredictorPort) -> None:
    with pytest.raises(UnknownJobError):
        port.get_training_report("nobody")


def test_the_facade_predicts_one_call(trained: PredictorPort) -> None:
    foretoken = Foretoken(predictor=trained)
    estimate = foretoken.predict("gemm", device="a30", dtype="bf16", m=8, n=4096, k=4096)
    columns = trained.predict(_gemms([8])).tables[0]
    assert estimate.latency_us == columns.latency_us[0]
    assert estimate.provenance is Provenance.MEASURED
    assert estimate.model_version == trained.list_models()[0].version
