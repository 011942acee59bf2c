"""A predictor that has learned the operators of `training_tables.py`, for benchmarks of steps."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training_tables import import_training_tables

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.job import JobState
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.service import PredictorService


@contextmanager
def trained_predictor(data: Path, home: Path | None = None) -> Iterator[PredictorService]:
    """Open a predictor trained on the shared measurements in `data`.

    With a `home` that exists it is the one there; one that does not is made and kept.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = home or Path(scratch) / "home"
        is_trained = folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        catalog = CatalogService(CatalogConfig(path=f"{folder}/catalog.duckdb"))
        catalog.open()
        predictor = PredictorService(PredictorConfig(state_folder=f"{folder}/predictor"), catalog)
        predictor.open()
        try:
            if not is_trained:
                import_training_tables(catalog, data, Path(scratch) / "thinned")
                _train(predictor)
            yield predictor
        finally:
            predictor.close()
            catalog.close()


@contextmanager
def open_measurements(data: Path, home: Path | None = None) -> Iterator[CatalogService]:
    """Open a catalog of the shared measurements in `data`, or that of a `home` which exists."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = home or Path(scratch)
        catalog = CatalogService(CatalogConfig(path=f"{folder}/catalog.duckdb"))
        catalog.open()
        try:
            if home is None:
                import_training_tables(catalog, data, Path(scratch) / "thinned")
            yield catalog
        finally:
            catalog.close()


def _train(predictor: PredictorService) -> None:
    job = predictor.create_training(TrainRequest())
    *_, last = predictor.watch_job(job.job_id)
    if last.state is not JobState.SUCCEEDED:
        raise SystemExit(last.error_message)
    report = predictor.get_training_report(job.job_id)
    sys.stdout.write(
        f"learned {report.num_rows:,} measurements of operators in {report.cpu_s:.0f} CPU s\n"
    )
