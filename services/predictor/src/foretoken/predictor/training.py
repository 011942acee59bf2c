"""Train every series that the catalog holds, keeping the models of those that did not change."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from foretoken.domain.errors import CorruptCatalogError
from foretoken.domain.ports import TrainRequest
from foretoken.domain.results.report import OperatorTrainingReport
from foretoken.jobs.runner import JobProgress
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.model_set import ModelSet, own_heads
from foretoken.predictor.model_store import StoredSeries, pack_model, store_series
from foretoken.predictor.report.scoring import merge_reports
from foretoken.predictor.training_rows import Series, SeriesKey
from foretoken.predictor.transfer import train_transfers
from foretoken.predictor.transfer.device_transfer import (
    hash_transfer,
    may_transfer,
    train_transfer_series,
)
from foretoken.predictor.transfer.library import DonorLibrary

_log = logging.getLogger(__name__)

# Shares of the progress bar: reading before, typical efficiencies after.
_READ_RATIO, _SERIES_RATIO = 0.05, 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Models without a version yet, how many of them were kept, and how good they are."""

    models: ModelSet
    num_reused: int
    reports: tuple[OperatorTrainingReport, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """What was trained before: a version, and further packed models by identity of training."""

    version: ModelSet
    learned: Mapping[str, bytes] = field(default_factory=dict)
    series: StoredSeries = field(init=False)
    _keys: Mapping[str, SeriesKey] = field(init=False)

    def __post_init__(self) -> None:
        """Store the version's series, and find them by how they were trained."""
        series = store_series(self.version.series)
        object.__setattr__(self, "series", series)
        keys = {head.content_hash: key for key, head in series.heads.items()}
        object.__setattr__(self, "_keys", keys)

    def find(self, content_hash: str) -> bytes | None:
        """Return a model that was trained so, packed; none where there is none to be read."""
        key = self._keys.get(content_hash)
        if key is None:
            return self.learned.get(content_hash)
        try:
            self.series.read_series(key)
            self.series.read_report(key)
            return self.series.packed(key)
        except CorruptCatalogError as err:
            _log.warning("trained anew: %s", err.message)
            return None


def train_models(
    found: Sequence[Series],
    request: TrainRequest,
    known: Known,
    config: PredictorConfig,
    progress: JobProgress,
) -> Trained:
    """Train what is found; the version's models that the request leaves alone stay.

    A model is kept, not trained again, where neither its rows and parameters nor what it borrows
    from other devices have changed.

    Raises:
        CancelledJobError: the job was cancelled.

    """
    before = known.series
    points = {series.key: series for series in found}
    kept = [head for key, head in before.heads.items() if not _is_asked(key, request)]

    def find(key: SeriesKey) -> Series:
        return points[key] if key in points else before.read_series(key)

    sizes = {head.key: head.num_points for head in kept}
    sizes |= {key: series.num_points for key, series in points.items()}
    library = DonorLibrary(sizes, find, request.seed)
    packed = {head.content_hash: before.packed(head.key) for head in kept}
    heads = {head.key: head for head in kept}
    num_reused = 0
    for ratio, label, series in _with_progress(found):
        heartbeat = partial(progress.update, _READ_RATIO + _SERIES_RATIO * ratio, label)
        heartbeat()
        pool = library.find(series.key) if may_transfer(series) else None
        head = series.head(hash_transfer(series, pool, config, request.seed))
        heads[series.key] = head
        same = known.find(head.content_hash)
        if same is not None:
            num_reused += 1
            packed[head.content_hash] = same
        else:
            model = train_transfer_series(series, pool, config, request.seed, heartbeat)
            packed[head.content_hash] = pack_model(model)
    after = StoredSeries(dict(sorted(heads.items())), packed)
    progress.update(_READ_RATIO + _SERIES_RATIO, "learning typical efficiencies")
    single = [head.key for head in own_heads(tuple(after.heads.values()))]
    transfers = train_transfers(map(find, single), config, request.seed)
    return Trained(
        models=ModelSet(series=after, transfers=transfers),
        num_reused=num_reused,
        reports=merge_reports(after.read_report(key) for key in single if key in points),
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
