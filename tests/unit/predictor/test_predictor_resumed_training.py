"""A training that was interrupted goes on with the series it had trained."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from predictor_fakes import FakeCatalog, all_reduce_rows, gemm_rows

from foretoken.domain.errors import ServiceUnavailableError
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.jobs.executor import R, S, T, keep_going
from foretoken.jobs.executors.inline import InlineExecutor
from foretoken.jobs.progress import JobProgress
from foretoken.jobs.record_file import RecordFile
from foretoken.predictor.config import BoosterConfig, PredictorConfig
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.training import Known, Trained, train_models
from foretoken.predictor.training_rows import read_series

_ROWS = [*gemm_rows(), *gemm_rows(device="h100_sxm"), *all_reduce_rows()]


class _Counting(InlineExecutor):
    """Counts what it does, and loses a service after so many tasks."""

    def __init__(self, max_tasks: int = 1_000) -> None:
        self.num_tasks = 0
        self._max_tasks = max_tasks

    def run(
        self,
        function: Callable[[T, S], R],
        items: Sequence[T],
        shared: S,
        check: Callable[[], None] = keep_going,
    ) -> Iterator[tuple[int, R]]:
        for place, result in super().run(function, items, shared, check):
            if self.num_tasks == self._max_tasks:
                raise ServiceUnavailableError("away")
            self.num_tasks += 1
            yield place, result


def _train(path: Path, executor: _Counting, folder: Path) -> Trained:
    found = read_series(FakeCatalog(_ROWS).read_measurements(MeasurementFilter()))
    config = PredictorConfig(state_folder=str(folder), booster=BoosterConfig(num_trees=5))
    progress = JobProgress(lambda _ratio, _message: None, threading.Event())
    with RecordFile(path, "models") as records:
        known = Known(ModelSet(), resumed=records, keep=records.append)
        return train_models(found, TrainRequest(), known, config, progress, executor)


def test_what_was_trained_is_not_trained_again(tmp_path: Path) -> None:
    path = tmp_path / "series"
    with pytest.raises(ServiceUnavailableError):
        _train(path, _Counting(2), tmp_path)
    with RecordFile(path, "models") as records:
        assert 2 == records.num_found
    whole = _train(tmp_path / "other", first := _Counting(), tmp_path)
    resumed = _train(path, second := _Counting(), tmp_path)
    assert (0, 2) == (whole.num_reused, resumed.num_reused)
    assert 2 == first.num_tasks - second.num_tasks
    assert whole.models.heads == resumed.models.heads
