"""Series trained side by side in processes: the same models, whatever happens to the workers."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from predictor_fakes import FakeCatalog, Train, all_reduce_rows, gemm_rows

from foretoken.domain.job import Job
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.results.report import PredictorTrainingReport
from foretoken.jobs.executors.inline import InlineExecutor
from foretoken.jobs.executors.local import LocalExecutor
from foretoken.predictor.config import BoosterConfig, PredictorConfig
from foretoken.predictor.series import Series
from foretoken.predictor.service import PredictorService
from foretoken.predictor.training import train_item
from foretoken.predictor.training_rows import read_series
from foretoken.predictor.transfer.pool import DonorPool
from foretoken.wire.arrow import rows_to_table

_ROWS = [*gemm_rows(), *all_reduce_rows()]

Item = tuple[Series, DonorPool | None]


def config_of(folder: Path, num_train_workers: int) -> PredictorConfig:
    return PredictorConfig(
        state_folder=str(folder),
        booster=BoosterConfig(num_trees=20),
        num_train_workers=num_train_workers,
    )


def train_all(
    catalog: FakeCatalog, folder: Path, num_train_workers: int, train: Train
) -> PredictorTrainingReport:
    service = PredictorService(config_of(folder, num_train_workers), catalog)
    service.open()
    try:
        return train(service)
    finally:
        service.close()


@pytest.mark.slow
def test_models_are_the_same_however_many_processes_train(tmp_path: Path, train: Train) -> None:
    """Versions are named by their bytes."""
    reports = [
        train_all(FakeCatalog(_ROWS), tmp_path / str(count), count, train) for count in (0, 1, 2)
    ]
    assert 1 == len({report.model_version for report in reports})
    assert [0, 0, 0] == [report.num_reused for report in reports]
    # What the workers spent is counted: they start, import and train.
    assert all(report.cpu_s > 0.5 for report in reports[1:])


@pytest.mark.slow
def test_unchanged_series_are_not_given_to_workers(tmp_path: Path, train: Train) -> None:
    catalog = FakeCatalog(_ROWS)
    first, again = (train_all(catalog, tmp_path, 1, train) for _ in range(2))
    assert len(read_series(rows_to_table(_ROWS))) == again.num_reused
    assert first.model_version == again.model_version


@pytest.fixture
def items() -> list[Item]:
    """Return series of one measurement each, so that there are many of them."""
    found = read_series(rows_to_table(_ROWS))
    return [
        (replace(series, key=replace(series.key, framework=f"vllm {version}")), None)
        for series in found
        for version in range(12)
    ]


@pytest.mark.slow
def test_what_a_killed_worker_trained_is_trained_again(tmp_path: Path, items: list[Item]) -> None:
    shared = config_of(tmp_path, 0), 0
    expected = dict(InlineExecutor().run(train_item, items, shared))
    executor = LocalExecutor(2)
    found = {}
    for place, packed in executor.run(train_item, items, shared):
        if not found:
            os.kill(executor.worker_pids[0], signal.SIGKILL)
        found[place] = packed
    num_restarts = executor.workers.num_restarts
    executor.close()
    assert 1 <= num_restarts
    assert expected == found


@pytest.mark.slow
def test_progress_counts_the_series(tmp_path: Path) -> None:
    service = PredictorService(config_of(tmp_path, 2), FakeCatalog(_ROWS))
    service.open()
    job = service.create_training(TrainRequest())
    seen: list[Job] = list(service.watch_job(job.job_id))
    service.close()
    ratios = [event.progress_ratio for event in seen]
    assert sorted(ratios) == ratios
    assert 1.0 == ratios[-1]
