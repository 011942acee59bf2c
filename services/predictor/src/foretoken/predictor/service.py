"""The predictor: trains on the catalog, keeps versions, answers queries."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.estimate import LatencyQuery, LatencyReply
from foretoken.domain.hardware.device import find_device
from foretoken.domain.job import Job
from foretoken.domain.job_runner import JobProgress, JobRunner, RunsJobs
from foretoken.domain.measurement import MeasurementFilter
from foretoken.domain.operator import find_operator
from foretoken.domain.ports import CatalogPort, ModelVersion, TrainRequest
from foretoken.domain.report import OperatorTrainingReport, PredictorTrainingReport
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.estimator import Estimator
from foretoken.predictor.model_set import ModelSet, own_models
from foretoken.predictor.model_store import ModelStore, version_of
from foretoken.predictor.trainer import SeriesModel, hash_training, train_series
from foretoken.predictor.training_rows import Series, SeriesKey, read_series
from foretoken.predictor.transfer import train_transfers

_log = logging.getLogger(__name__)

_TRAINING = "train"


def _utc_now() -> str:
    return datetime.now(tz=UTC).isoformat(timespec="milliseconds")


class PredictorService(RunsJobs):
    """Implements `PredictorPort`. Trainings run one after the other, in a thread."""

    def __init__(
        self, config: PredictorConfig, catalog: CatalogPort, now: Callable[[], str] = _utc_now
    ) -> None:
        """Keep the ports; `now` returns ISO 8601 UTC."""
        folder = Path(config.state_folder).expanduser()
        super().__init__(JobRunner(folder / "jobs"))
        self._config = config
        self._catalog = catalog
        self._now = now
        self._store = ModelStore(folder / "models", config.num_threads)
        self._models = ModelSet()
        self._estimator = Estimator(self._models, config.measured_weight)

    def open(self) -> None:
        """Load the active version and the jobs of earlier processes."""
        self._store.open()
        self._jobs.open()
        self._use(self._store.load_active())

    def close(self) -> None:
        """Cancel what trains and wait for it."""
        self._jobs.close()

    def create_training(self, request: TrainRequest) -> Job:
        """Start training on the catalog's present content; the result becomes active.

        With a device or an operator only their models are trained; the others stay as they are.
        A model whose rows and parameters have not changed is kept, not trained again.

        Raises:
            UnknownDeviceError, UnknownOperatorError: no file of that name.

        """
        device = find_device(request.device).name if request.device else ""
        operator = find_operator(request.operator).name if request.operator else ""
        checked = TrainRequest(device=device, operator=operator, seed=request.seed)
        return self._jobs.create(_TRAINING, lambda progress: self._train(checked, progress))

    def get_training_report(self, job_id: str) -> PredictorTrainingReport:
        """Return the result of a finished training job."""
        return self._jobs.result(job_id, PredictorTrainingReport)

    def predict(self, query: LatencyQuery) -> LatencyReply:
        """Return estimates for every row of every table; works without any training too."""
        return self._estimator.predict(query)

    def list_models(self) -> tuple[ModelVersion, ...]:
        """Return the stored model versions, newest first."""
        return self._store.list()

    def _train(self, request: TrainRequest, progress: JobProgress) -> PredictorTrainingReport:
        started_s = time.process_time()
        selection = MeasurementFilter(device=request.device, operator=request.operator)
        progress.update(0.0, "reading the catalog")
        snapshot = self._catalog.create_snapshot(selection)
        kept_rows = MeasurementFilter(snapshot=snapshot.content_hash)
        found = read_series(self._catalog.read_measurements(kept_rows))
        if not found:
            raise InvalidRequestError(
                "the catalog has no rows to train on; profile a device or import measurements"
            )
        trained = self._train_all(found, request.seed, progress)
        kept = {
            key: model
            for key, model in self._models.series.items()
            if not _is_selected(key, request)
        }
        series = dict(sorted({**kept, **trained}.items()))
        progress.update(0.95, "learning typical efficiencies")
        models = ModelSet(
            version=version_of(series),
            created_at=self._now(),
            snapshot_hash=snapshot.content_hash,
            series=series,
            transfers=train_transfers(list(own_models(series)), self._config, request.seed),
        )
        self._store.save(models)
        # What a model was trained on must not be pruned.
        self._catalog.create_snapshot(kept_rows, f"model {models.version}")
        self._store.activate(models.version)
        self._use(self._store.load(models.version))
        _log.info("trained: version=%s rows=%d", models.version, models.num_rows)
        return PredictorTrainingReport(
            model_version=models.version,
            snapshot_hash=snapshot.content_hash,
            num_rows=snapshot.num_rows,
            cpu_s=time.process_time() - started_s,
            operators=tuple(_report_operators(trained)),
        )

    def _train_all(
        self, found: tuple[Series, ...], seed: int, progress: JobProgress
    ) -> dict[SeriesKey, SeriesModel]:
        present = {model.content_hash: model for model in self._models.series.values()}
        num_points = sum(len(series.points) for series in found)
        trained: dict[SeriesKey, SeriesModel] = {}
        done = 0
        for series in found:
            label = f"{series.key.operator} on {series.key.topology or series.key.device}"
            progress.update(0.05 + 0.9 * done / num_points, f"training {label}")
            same = present.get(hash_training(series, self._config, seed))
            trained[series.key] = same or train_series(series, self._config, seed)
            done += len(series.points)
        return trained

    def _use(self, models: ModelSet) -> None:
        self._models = models
        self._estimator = Estimator(models, self._config.measured_weight)


def _is_selected(key: SeriesKey, request: TrainRequest) -> bool:
    return request.device in ("", key.device) and request.operator in ("", key.operator)


def _report_operators(
    trained: Mapping[SeriesKey, SeriesModel],
) -> Iterator[OperatorTrainingReport]:
    """Yield one entry per operator and device, its series weighted by what they held out.

    For a collective the topology stands for the device.
    """
    groups: dict[tuple[str, str], list[SeriesModel]] = {}
    for model in own_models(trained):
        key = model.series.key
        groups.setdefault((key.operator, key.topology or key.device), []).append(model)
    for (operator, device), models in sorted(groups.items()):
        scores = [model.score for model in models]
        num_held_out = sum(score.num_held_out for score in scores)
        shares = [score.num_held_out / max(num_held_out, 1) for score in scores]
        pairs = list(zip(shares, scores, strict=True))
        yield OperatorTrainingReport(
            operator=operator,
            device=device,
            num_rows=sum(len(model.series.points) for model in models),
            num_held_out=num_held_out,
            held_out_mape_ratio=sum(share * s.mape_ratio for share, s in pairs),
            held_out_p90_ratio=max(s.p90_ratio for s in scores),
            interval_coverage_ratio=sum(share * s.interval_coverage_ratio for share, s in pairs),
        )
