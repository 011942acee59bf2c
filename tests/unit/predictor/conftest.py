"""Predictors on synthetic catalogs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from predictor_fakes import FakeCatalog, MakePredictor, Rows, Train

from foretoken.domain.job import JobState
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.results.report import PredictorTrainingReport
from foretoken.predictor.config import BoosterConfig, PredictorConfig
from foretoken.predictor.service import PredictorService

_EVERYTHING = TrainRequest()


@pytest.fixture
def make_predictor(tmp_path: Path) -> Iterator[MakePredictor]:
    """Return a function that opens a predictor over rows; state and versions survive a call."""
    with _predictors(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def make_shared_predictor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakePredictor]:
    """The same for a predictor that a module's tests only ask."""
    with _predictors(tmp_path_factory.mktemp("shared")) as make:
        yield make


@contextmanager
def _predictors(folder: Path) -> Iterator[MakePredictor]:
    kept = FakeCatalog().artifacts
    with ExitStack() as opened:

        def make(rows: Rows) -> PredictorService:
            config = PredictorConfig(
                state_folder=str(folder / "state"), booster=BoosterConfig(num_trees=60)
            )
            catalog = FakeCatalog(rows)
            catalog.artifacts = kept
            service = PredictorService(config, catalog)
            service.open()
            opened.callback(service.close)
            return service

        yield make


def _train(
    service: PredictorService, request: TrainRequest = _EVERYTHING
) -> PredictorTrainingReport:
    job = service.create_training(request)
    *_, last = service.watch_job(job.job_id)
    assert last.state is JobState.SUCCEEDED, last.error_message
    return service.get_training_report(job.job_id)


@pytest.fixture(scope="session")
def train() -> Train:
    """Return a function that trains a predictor and waits for its report."""
    return _train
