"""Train every series that the catalog holds, keeping the models of those that did not change."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from foretoken.domain.ports import TrainRequest
from foretoken.domain.results.report import OperatorTrainingReport
from foretoken.jobs.runner import JobProgress
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.model_set import ModelSet, own_models
from foretoken.predictor.report.scoring import merge_reports
from foretoken.predictor.trainer import SeriesModel
from foretoken.predictor.training_rows import Series, SeriesKey
from foretoken.predictor.transfer import train_transfers
from foretoken.predictor.transfer.device_transfer import (
    hash_transfer,
    may_transfer,
    train_transfer_series,
)
from foretoken.predictor.transfer.library import DonorLibrary

# Shares of the progress bar: reading before, typical efficiencies after.
_READ_RATIO, _SERIES_RATIO = 0.05, 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Models without a version yet, how many of them were kept, and how good they are."""

    models: ModelSet
    num_reused: int
    reports: tuple[OperatorTrainingReport, ...]


def train_models(
    found: Sequence[Series],
    request: TrainRequest,
    present: ModelSet,
    config: PredictorConfig,
    progress: JobProgress,
) -> Trained:
    """Train what is found; present models that the request leaves alone stay.

    A model is kept, not trained again, where neither its rows and parameters nor what it borrows
    from other devices have changed.

    Raises:
        CancelledJobError: the job was cancelled.

    """
    kept = {key: model for key, model in present.series.items() if not _is_asked(key, request)}
    known = {model.content_hash: model for model in present.series.values()}
    library = DonorLibrary([*found, *(model.series for model in kept.values())], request.seed)
    trained: dict[SeriesKey, SeriesModel] = {}
    num_reused = 0
    for ratio, label, series in _with_progress(found):
        heartbeat = partial(progress.update, _READ_RATIO + _SERIES_RATIO * ratio, label)
        heartbeat()
        pool = library.find(series.key) if may_transfer(series) else None
        same = known.get(hash_transfer(series, pool, config, request.seed))
        num_reused += same is not None
        trained[series.key] = same or train_transfer_series(
            series, pool, config, request.seed, heartbeat
        )
    series_models = dict(sorted({**kept, **trained}.items()))
    progress.update(_READ_RATIO + _SERIES_RATIO, "learning typical efficiencies")
    transfers = train_transfers(list(own_models(series_models)), config, request.seed)
    return Trained(
        models=ModelSet(series=series_models, transfers=transfers),
        num_reused=num_reused,
        reports=merge_reports(model.report for model in own_models(trained)),
    )


def _with_progress(found: Sequence[Series]) -> Iterator[tuple[float, str, Series]]:
    num_points = sum(len(series.points) for series in found)
    done = 0
    for number, series in enumerate(found, start=1):
        key = series.key
        label = f"{key.operator} on {key.topology or key.device}, {number} of {len(found)}"
        yield done / num_points, label, series
        done += len(series.points)


def _is_asked(key: SeriesKey, request: TrainRequest) -> bool:
    return request.device in ("", key.device) and request.operator in ("", key.operator)
