"""The predictor: trains on the catalog, keeps versions, answers queries."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foretoken.domain import schema
from foretoken.domain.errors import ForetokenError, InvalidRequestError, OutOfCoverageError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.job import Job
from foretoken.domain.measurements.correction import Correction, CorrectionRequest
from foretoken.domain.measurements.estimate import (
    Explanation,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
)
from foretoken.domain.measurements.latency_models import ModelVersion, TrainRequest
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.measurements.planning import PlanRequest, ProfilePlan
from foretoken.domain.measurements.surface import LatencySurface, SurfaceQuery
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.results.report import PredictorTrainingReport
from foretoken.jobs.record_file import RecordFile
from foretoken.jobs.runner import JobLimits, JobProgress, JobRunner, Work
from foretoken.jobs.service import RunsJobs
from foretoken.jobs.sharing import SharedJobs
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.correction import CorrectionBook, apply_correction
from foretoken.predictor.drift import DriftWatch
from foretoken.predictor.estimate_cache import EstimateCache
from foretoken.predictor.estimator import Estimator
from foretoken.predictor.explaining import explain
from foretoken.predictor.learned_folder import LearnedFolder
from foretoken.predictor.model_library import ModelLibrary
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.on_demand import Learner
from foretoken.predictor.packed_model import STORE_REVISION
from foretoken.predictor.planning.profile_plan import plan_profile
from foretoken.predictor.query_check import check_query
from foretoken.predictor.query_columns import grid_columns
from foretoken.predictor.recent_rows import parse_time
from foretoken.predictor.starter import LayeredModels, layer, open_starter, own_version
from foretoken.predictor.statistics import PredictionStatistics
from foretoken.predictor.training import Known, open_workers, train_models
from foretoken.predictor.upkeep import RepeatedWork

if TYPE_CHECKING:
    from foretoken.domain.ports import CatalogPort

_log = logging.getLogger(__name__)

_TRAINING = "train"
# Enough calls to be answered by compiled code.
_WARM_UP_ROWS = 256
# Versions whose models stay above those of the starter, in addition to the one asked for last.
_MAX_LAYERS = 2


def _utc_now() -> str:
    return datetime.now(tz=UTC).isoformat(timespec="milliseconds")


class PredictorService(RunsJobs):
    """Implements `PredictorPort`. Trainings run one after the other, in a thread."""

    def __init__(
        self,
        config: PredictorConfig,
        catalog: "CatalogPort",
        now: Callable[[], str] = _utc_now,
        sharing: SharedJobs | None = None,
    ) -> None:
        """Keep the ports; `now` returns ISO 8601 UTC.

        With `sharing` trainings are those of all predictors of the catalog.
        """
        folder = Path(config.state_folder).expanduser()
        super().__init__(
            JobRunner(
                folder / "jobs",
                limits=JobLimits(max_per_caller=config.max_jobs_per_caller),
                sharing=sharing,
            )
        )
        self._shares_jobs = sharing is not None
        self._config = config
        self._folder = folder
        self._starter: ModelSet | None = None
        self._layers: dict[str, LayeredModels] = {}
        self._catalog = catalog
        self._now = now
        learned = LearnedFolder(folder / "learned")
        self._library = ModelLibrary(
            catalog,
            folder / "models",
            learned,
            max_loaded=config.max_pinned_models,
        )
        self._learner = Learner(catalog, learned, config)
        self.statistics = PredictionStatistics()
        self._cache = EstimateCache(config.max_cached_rows, self.statistics.observe_cache)
        self._corrections = CorrectionBook(catalog, now)
        self.drift = DriftWatch(catalog, self._estimate_afresh, lambda: self._library.active)
        self._repeated = (
            RepeatedWork("looking for model versions", self._refresh, config.refresh_s),
            RepeatedWork("comparing new measurements", self.drift.check, config.drift_s),
        )

    def open(self) -> None:
        """Load the active version and the jobs of earlier processes, and look for new versions."""
        self._jobs.open({_TRAINING: self._resume_training})
        self._library.open()
        if self._config.starter:
            kept = self._folder / "starter"
            self._starter = open_starter(Path(self._config.starter), kept, self._config)
        self.statistics.observe_model(self._library.active.version)
        for work in self._repeated:
            work.start()

    def model_snapshot_s(self) -> float:
        """Return from when the active model's measurements are, in s since 1970; 0 without one."""
        created_at = self._library.active.created_at
        return parse_time(created_at).timestamp() if created_at else 0.0

    def close(self) -> None:
        """Cancel what trains and wait for it."""
        for work in self._repeated:
            work.stop()
        self._jobs.close()

    def warm_up(self) -> None:
        """Answer a table of some series, so that the first caller need not wait for compilers."""
        models = self._library.active.series
        for key in models:
            if not key.spec.is_collective:
                model = models[key]
                rows = np.arange(_WARM_UP_ROWS) % len(model.series.points)
                columns = {name: column[rows] for name, column in model.series.columns.items()}
                table = OperatorTable(
                    operator=key.operator,
                    dtype=key.target.dtype,
                    phase=key.target.phase,
                    columns=columns,
                    variant=key.variant,
                )
                self._estimate_afresh(LatencyQuery(device=key.device, tables=(table,)))
                return

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
        return self._jobs.create(
            _TRAINING,
            lambda progress: self._train(checked, progress),
            checked if self._shares_jobs else None,
            f"{operator or 'all operators'} on {device or 'all devices'}",
        )

    def _resume_training(self, plain: Any) -> Work:
        request = schema.decode(TrainRequest, plain, "request")
        return lambda progress: self._train(request, progress)

    def get_training_report(self, job_id: str) -> PredictorTrainingReport:
        """Return the result of a finished training job."""
        return self._jobs.result(job_id, PredictorTrainingReport)

    def predict(self, query: LatencyQuery) -> LatencyReply:
        """Return estimates for every row of every table; works without any training too.

        Raises:
            UnknownModelVersionError, UnknownCorrectionError: what the query names is not kept.
            as `Estimator.predict`.

        """
        started_s = time.perf_counter()
        self._check(query)
        try:
            reply = self._estimate(query)
        except OutOfCoverageError as err:
            self.statistics.observe_refusal(err.details["operator"])
            raise
        elapsed_s = time.perf_counter() - started_s
        num_rows = sum(table.num_rows for table in query.tables)
        for table, estimates in zip(query.tables, reply.tables, strict=True):
            share = table.num_rows / num_rows if num_rows else 0.0
            self.statistics.observe(table, estimates, elapsed_s * share)
        return reply

    def tabulate(self, query: SurfaceQuery) -> LatencySurface:
        """Return estimates of one operator over a grid of its dimensions."""
        reply = self.predict(query.to_query(grid_columns(query.axes)))
        return LatencySurface(
            axes=query.axes, estimates=reply.tables[0], model_version=reply.model_version
        )

    def explain(self, query: LatencyQuery) -> Explanation:
        """Return why the estimate of a single call is what it is.

        Raises:
            InvalidRequestError: the query is not of exactly one call.
            as `predict`.

        """
        models = self._find(query)
        self._check(query)
        return explain(models, query, self._ask(models))

    def plan_profile(self, request: PlanRequest) -> ProfilePlan:
        """Return which points to profile next, the most useful for its cost first."""
        models = self._find(request.to_query())
        self._check(request.to_query())
        return plan_profile(models, request, self._ask(models))

    def list_models(self) -> tuple[ModelVersion, ...]:
        """Return the stored model versions, newest first."""
        return self._library.list()

    def activate_model(self, version: str) -> ModelVersion:
        """Make a stored version the one that answers, for every predictor of this catalog."""
        model = self._library.activate(version)
        self.statistics.observe_model(model.version)
        return model

    def create_correction(self, request: CorrectionRequest) -> Correction:
        """Learn a correction from observations, and keep it under its name."""
        return self._corrections.learn(request, self._estimate)

    def list_corrections(self) -> tuple[Correction, ...]:
        """Return the corrections, newest first."""
        return self._corrections.list()

    def _find(self, query: LatencyQuery) -> ModelSet:
        """Return the models that answer, above those of the starter."""
        own = self._find_own(query)
        if self._starter is None:
            return own
        layered = self._layers.get(own.version)
        if layered is None or layered.own is not own:
            layered = layer(own, self._starter)
            kept = [*self._layers.items()][-_MAX_LAYERS:]
            self._layers = {**dict(kept), own.version: layered}
        return layered

    def _find_own(self, query: LatencyQuery) -> ModelSet:
        """Return the models of a pinned version, else the active one's with what can be learned.

        A reply may be asked for again by the name of what answered, as long as the catalog is the
        same.
        """
        version = own_version(query.model_version)
        if version in ("", self._library.active.version):
            return self._learner.complete(self._library.active, query)
        learned = self._learner.complete(self._library.active)
        return learned if version == learned.version else self._library.find(version)

    def _check(self, query: LatencyQuery) -> None:
        check_query(query, [head.key for head in self._find(query).heads_for(query)])

    def _estimate(self, query: LatencyQuery) -> LatencyReply:
        return self._correct(query, self._find(query))

    def _correct(self, query: LatencyQuery, models: ModelSet) -> LatencyReply:
        reply = Estimator(models, self._cache).predict(query)
        if not query.correction:
            return reply
        correction = self._corrections.find(query.correction, find_device(query.device).name)
        return apply_correction(correction, query, reply)

    def _ask(self, models: ModelSet) -> Callable[[LatencyQuery], LatencyReply]:
        """Return what answers by these models, also when others become active meanwhile."""
        return lambda query: self._correct(query, models)

    def _estimate_afresh(self, query: LatencyQuery) -> LatencyReply:
        """Answer what will not be asked again by what was trained already."""
        models = self._library.find(query.model_version)
        return Estimator(models).predict(query)

    def _refresh(self, _is_stopped: Callable[[], bool]) -> None:
        self._corrections.refresh()
        try:
            if self._library.refresh():
                self.statistics.observe_model(self._library.active.version)
        except ForetokenError:
            self.statistics.observe_failed_model_load()
            raise

    @contextmanager
    def _find_known(self, progress: JobProgress) -> Iterator[Known]:
        """Give what need not be trained, also what this job had trained in another process."""
        before = self._library.active, self._learner.kept
        if not self._shares_jobs:
            yield Known(*before)
            return
        path = progress.kept_path("-".join(map(str, ("series", *STORE_REVISION))))
        with RecordFile(path, "the models of a training") as records:
            yield Known(*before, records, records.append)

    def _train(self, request: TrainRequest, progress: JobProgress) -> PredictorTrainingReport:
        selection = MeasurementFilter(device=request.device, operator=request.operator)
        started_s = time.process_time()
        progress.update(0.0, "reading the catalog")
        # What is recorded from here on is new to the model.
        created_at = self._now()
        snapshot = self._catalog.create_snapshot(selection)
        kept_rows = MeasurementFilter(snapshot=snapshot.content_hash)
        from foretoken.predictor.training_rows import read_series

        found = read_series(self._catalog.read_measurements(kept_rows))
        if not found:
            asked = [text for text in (request.operator, request.device) if text]
            of_what = f" of {' on '.join(asked)}" if asked else ""
            raise InvalidRequestError(
                f"the catalog has no rows{of_what} to train on; profile a device or import "
                f"measurements"
            )
        with self._find_known(progress) as known, open_workers(found, self._config) as executor:
            trained = train_models(found, request, known, self._config, progress, executor)
        models = self._library.keep(
            replace(trained.models, created_at=created_at, snapshot_hash=snapshot.content_hash)
        )
        # What a model that answers was trained on must not be pruned.
        self._catalog.create_snapshot(kept_rows, f"model {models.version}")
        self._library.take_up(models)
        self._learner.kept.forget(trained.trained)
        self.statistics.observe_model(models.version)
        _log.info("trained: version=%s rows=%d", models.version, models.num_rows)
        return PredictorTrainingReport(
            model_version=models.version,
            snapshot_hash=snapshot.content_hash,
            num_rows=snapshot.num_rows,
            cpu_s=time.process_time() - started_s + executor.worker_cpu_s,
            created_at=models.created_at,
            num_reused=trained.num_reused,
            operators=trained.reports,
        )
