"""A training that was interrupted goes on with the series it had trained."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from predictor_fakes import FakeCatalog, all_reduce_rows, gemm_rows

from foretoken.domain.errors import ServiceUnavailableError, StorageFullError
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.ports import TrainRequest
from foretoken.jobs.executor import R, S, T, keep_going
from foretoken.jobs.executors.inline import InlineExecutor
from foretoken.jobs.progress import JobProgress
from foretoken.predictor.config import BoosterConfig, PredictorConfig
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.training import Known, Trained, train_models
from foretoken.predictor.training_journal import TrainingJournal
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


def _train(journal: TrainingJournal, executor: _Counting, folder: Path) -> Trained:
    found = read_series(FakeCatalog(_ROWS).read_measurements(MeasurementFilter()))
    known = Known(ModelSet(), resumed=journal.read(), keep=journal.append)
    config = PredictorConfig(state_folder=str(folder), booster=BoosterConfig(num_trees=5))
    progress = JobProgress(lambda _ratio, _message: None, threading.Event())
    return train_models(found, TrainRequest(), known, config, progress, executor)


def test_what_was_trained_is_not_trained_again(tmp_path: Path) -> None:
    journal = TrainingJournal(tmp_path / "series")
    with pytest.raises(ServiceUnavailableError):
        _train(journal, _Counting(2), tmp_path)
    assert 2 == len(journal.read())
    whole = _train(TrainingJournal(tmp_path / "other"), first := _Counting(), tmp_path)
    resumed = _train(journal, second := _Counting(), tmp_path)
    assert (0, 2) == (whole.num_reused, resumed.num_reused)
    assert 2 == first.num_tasks - second.num_tasks
    assert whole.models.heads == resumed.models.heads


def test_what_a_crash_tore_off_and_what_another_version_wrote_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "series"
    journal = TrainingJournal(path)
    assert {} == journal.read()
    journal.append("one", b"1\n" * 500)
    other = path.read_bytes().replace(b'"one"', b'"old"').replace(b"[", b"[9")
    with path.open("ab") as file:
        file.write(other)
    journal.append("two", b"2" * 1_000)
    whole = path.read_bytes()
    for torn in (b"", b"{", b'{"content_hash": "x"}\n', whole[-100:], other[:-1]):
        path.write_bytes(whole + torn)
        assert {"one": b"1\n" * 500, "two": b"2" * 1_000} == journal.read()
        assert whole == path.read_bytes()
    path.write_bytes(whole[:-1] + b"3")
    assert ["one"] == list(journal.read())


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageFullError, match="make room"):
        TrainingJournal(tmp_path / "none" / "series").append("one", b"1")
