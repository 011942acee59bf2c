"""How far the active model is from measurements that were recorded after it was trained."""

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from foretoken.domain.errors import ForetokenError
from foretoken.domain.measurements.estimate import LatencyQuery, LatencyReply
from foretoken.domain.measurements.measurement import MeasurementFilter, RunSummary
from foretoken.predictor.recent_rows import MeasuredTable, may_be_recent, parse_time, read_recent
from foretoken.predictor.roofline import FloatColumn

if TYPE_CHECKING:
    from foretoken.domain.ports import CatalogPort

_log = logging.getLogger(__name__)

Predict = Callable[[LatencyQuery], LatencyReply]
_Subject = tuple[str, str]


class TrainedModel(Protocol):
    """What answers, and since when measurements are new to it; no version where nothing does.

    The moment is empty while the model is a copy whose catalog was not heard of yet.
    """

    @property
    def version(self) -> str:
        """The version."""

    @property
    def created_at(self) -> str:
        """ISO 8601 UTC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftEntry:
    """Recent measurements of an operator on a device against the active model.

    Errors are measured over estimated minus 1: `error_ratio_*` of their absolute values,
    `bias_ratio_median` of the signed ones (positive: slower than estimated). `inside_ratio` is the
    share of measurements inside the nominal 90 % intervals.
    """

    operator: str
    device: str
    num_rows: int
    error_ratio_median: float
    error_ratio_p90: float
    bias_ratio_median: float
    inside_ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftReport:
    """What is known of one model version.

    `num_left_out` usable rows were not compared. `num_flagged` rows of the runs looked at are
    flagged by the catalog. Those flagged only for disagreeing with what was measured before are
    compared, the others are not.
    """

    model_version: str = ""
    entries: tuple[DriftEntry, ...] = ()
    num_left_out: int = 0
    num_flagged: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftLimits:
    """Most rows compared in one check, and in all; the newest runs have precedence."""

    max_rows_per_check: int = 50_000
    max_rows: int = 500_000


class DriftWatch:
    """Compares the catalog's new measurements with the model, a bounded number at each check."""

    def __init__(
        self,
        catalog: "CatalogPort",
        predict: Predict,
        active_model: Callable[[], TrainedModel],
        limits: DriftLimits | None = None,
    ) -> None:
        """Keep the ports.

        `predict` answers with the active model, and should count nothing as a user's question.
        `active_model` says which that is.
        """
        self._catalog = catalog
        self._predict = predict
        self._active_model = active_model
        self._limits = limits or DriftLimits()
        self._lock = threading.Lock()
        self._compared: dict[str, _ComparedRun] = {}
        self._report = DriftReport()

    @property
    def report(self) -> DriftReport:
        """What the last check found."""
        return self._report

    def check(self, is_stopped: Callable[[], bool] = lambda: False) -> DriftReport:
        """Compare runs that are new or have grown since the last check, and return the report.

        A run that does not fit is left to the next check. One that is larger than a whole check is
        represented by every second, third, ... row. With another model everything starts anew.
        `is_stopped` ends the check early.

        Raises:
            ForetokenError: the catalog cannot be read; what was compared stays.

        """
        with self._lock:
            model = self._active_model()
            if model.version != self._report.model_version:
                self._compared = {}
                self._report = DriftReport(model_version=model.version)
            if model.version and model.created_at:
                self._compare_runs(model, is_stopped)
            return self._report

    def _compare_runs(self, model: TrainedModel, is_stopped: Callable[[], bool]) -> None:
        since = parse_time(model.created_at)
        recent = [run for run in self._catalog.list_runs() if may_be_recent(run, since)]
        kept = {run.run.run_id: run for run in self._newest(recent)}
        self._compared = {name: one for name, one in self._compared.items() if name in kept}
        for run in self._choose(list(kept.values())):
            compared = self._compare(run, model.version, since, is_stopped)
            if compared is None:
                return
            self._compared[run.run.run_id] = compared
        num_left_out = sum(self._count_left_out(run) for run in recent)
        if num_left_out > self._report.num_left_out:
            _log.info("recent measurements not compared with the model: rows=%d", num_left_out)
        self._report = DriftReport(
            model_version=model.version,
            entries=tuple(_summarise(list(self._compared.values()))),
            num_left_out=num_left_out,
            num_flagged=sum(run.num_flagged for run in recent),
        )

    def _newest(self, runs: Sequence[RunSummary]) -> Iterator[RunSummary]:
        """Yield runs, newest first, up to the most rows that are compared in all."""
        room = self._limits.max_rows
        for run in runs:
            room -= self._num_wanted(run)
            if room < 0:
                return
            yield run

    def _choose(self, runs: list[RunSummary]) -> Iterator[RunSummary]:
        """Yield the runs that one check can read: first those never read, the newest before."""
        room = self._limits.max_rows_per_check
        for run in sorted(runs, key=lambda run: run.run.run_id in self._compared):
            compared = self._compared.get(run.run.run_id)
            is_same = compared is not None and compared.seen == run
            if not is_same and self._num_wanted(run) <= room:
                room -= self._num_wanted(run)
                yield run

    def _compare(
        self, run: RunSummary, version: str, since: datetime, is_stopped: Callable[[], bool]
    ) -> "_ComparedRun | None":
        """Return how a run compares, None when the check must end before that is known."""
        if is_stopped():
            return None
        selection = MeasurementFilter(run_id=run.run.run_id, include_flagged=True)
        stream = self._catalog.read_measurements(selection)
        compared = _ComparedRun(run)
        for table in read_recent(stream, run, since, self._step(run)):
            if is_stopped():
                return None
            try:
                reply = self._predict(table.query)
            except ForetokenError as err:
                _log.debug("recent measurements have no estimate: %s", err.message)
                compared.num_unanswered += len(table.latency_us)
                continue
            if reply.model_version != version:
                return None
            compared.add(table, reply)
        return compared

    def _step(self, run: RunSummary) -> int:
        """Return how far apart the rows of a run are that one check has room for."""
        return max(math.ceil(_num_usable(run) / self._limits.max_rows_per_check), 1)

    def _num_wanted(self, run: RunSummary) -> int:
        return math.ceil(_num_usable(run) / self._step(run))

    def _count_left_out(self, run: RunSummary) -> int:
        compared = self._compared.get(run.run.run_id)
        if compared is None:
            return _num_usable(run)
        return _num_usable(run) - self._num_wanted(compared.seen) + compared.num_unanswered


@dataclass(slots=True)
class _ComparedRun:
    """Errors of a run as it was seen, by operator and device, in pieces."""

    seen: RunSummary
    errors: dict[_Subject, list[FloatColumn]] = field(default_factory=dict)
    inside: dict[_Subject, list[npt.NDArray[np.bool_]]] = field(default_factory=dict)
    num_unanswered: int = 0

    def add(self, table: MeasuredTable, reply: LatencyReply) -> None:
        (estimates,) = reply.tables
        measured_us = table.latency_us
        is_inside = (estimates.low_us <= measured_us) & (measured_us <= estimates.high_us)
        error_ratio = measured_us / np.asarray(estimates.latency_us) - 1.0
        self.errors.setdefault(table.subject, []).append(error_ratio)
        self.inside.setdefault(table.subject, []).append(is_inside)


def _num_usable(run: RunSummary) -> int:
    return max(run.num_rows - run.num_failed, 0)


def _summarise(runs: Sequence[_ComparedRun]) -> Iterator[DriftEntry]:
    for subject in sorted({subject for run in runs for subject in run.errors}):
        errors = np.concatenate([e for run in runs for e in run.errors.get(subject, ())])
        inside = np.concatenate([i for run in runs for i in run.inside.get(subject, ())])
        median, p90 = np.quantile(np.abs(errors), (0.5, 0.9)).tolist()
        operator, device = subject
        yield DriftEntry(
            operator=operator,
            device=device,
            num_rows=len(errors),
            error_ratio_median=median,
            error_ratio_p90=p90,
            bias_ratio_median=float(np.median(errors)),
            inside_ratio=float(inside.mean()),
        )
