"""Train every series that the catalog holds, keeping the models of those that did not change."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field

from foretoken.domain.errors import CorruptCatalogError
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.results.report import OperatorTrainingReport
from foretoken.jobs.executor import Executor
from foretoken.jobs.executors.choice import open_executor
from foretoken.jobs.executors.inline import InlineExecutor
from foretoken.jobs.executors.observed import ObservedExecutor
from foretoken.jobs.runner import JobProgress
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.model_set import ModelSet, newest_heads, own_heads
from foretoken.predictor.model_store import StoredSeries, store_series
from foretoken.predictor.packed_model import pack_model, pack_points
from foretoken.predictor.scoring import merge_reports
from foretoken.predictor.series import Series, SeriesHead, SeriesKey
from foretoken.predictor.transfer import train_transfers
from foretoken.predictor.transfer.device_transfer import (
    hash_transfer,
    may_transfer,
    train_transfer_series,
)
from foretoken.predictor.transfer.library import DonorLibrary
from foretoken.predictor.transfer.pool import DonorPool

_log = logging.getLogger(__name__)

# So many points are trained on in about as long as workers take to start, a second or two.
_MAX_POINTS_HERE = 20_000

# Shares of the progress bar: reading before, typical efficiencies after.
_READ_RATIO, _SERIES_RATIO = 0.05, 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Models without a version yet, how many of them were kept, and how good they are.

    Of series that are not among those `trained` there are the points alone.
    """

    models: ModelSet
    trained: tuple[SeriesHead, ...]
    num_reused: int
    reports: tuple[OperatorTrainingReport, ...]


def _keep_nothing(_key: bytes, _packed: bytes) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Known:
    """What was trained before: a version, and further packed models by identity of training.

    `resumed` are those of this very training, before it was interrupted; `keep` is given each model
    that is trained now, as soon as it is. Their keys are the identities as bytes.
    """

    version: ModelSet
    learned: Mapping[str, bytes] = field(default_factory=dict)
    resumed: Mapping[bytes, bytes] = field(default_factory=dict)
    keep: Callable[[bytes, bytes], None] = _keep_nothing
    series: StoredSeries = field(init=False)
    _keys: Mapping[str, SeriesKey] = field(init=False)

    def __post_init__(self) -> None:
        """Store the version's series, and find them by how they were trained."""
        series = store_series(self.version.series)
        object.__setattr__(self, "series", series)
        keys = {head.content_hash: key for key, head in series.heads.items()}
        object.__setattr__(self, "_keys", keys)

    def has(self, content_hash: str) -> bool:
        """Tell whether the version has a series that is trained so."""
        return content_hash in self._keys

    def find(self, content_hash: str) -> bytes | None:
        """Return a model that was trained so, packed; none where there is none to be read."""
        key = self._keys.get(content_hash)
        try:
            if key is None or not self.series.has_model(key):
                resumed = self.resumed.get(bytes.fromhex(content_hash))
                return resumed or self.learned.get(content_hash)
            self.series.read_series(key)
            self.series.read_report(key)
            return self.series.packed(key)
        except CorruptCatalogError as err:
            _log.warning("trained anew: %s", err.message)
            return None


@contextmanager
def open_workers(found: Sequence[Series], config: PredictorConfig) -> Iterator[ObservedExecutor]:
    """Give what trains series: this thread where they are soon done, or workers.

    Raises:
        as `open_executor`.

    """
    executor: Executor = InlineExecutor()
    num_points = sum(series.num_points for series in found)
    if config.ray_address or config.num_train_workers or num_points > _MAX_POINTS_HERE:
        executor = open_executor(
            config.ray_address, config.num_train_workers, field="predictor.ray_address"
        )
    observed = ObservedExecutor(executor)
    try:
        yield observed
    finally:
        observed.close()


def train_models(
    found: Sequence[Series],
    request: TrainRequest,
    known: Known,
    config: PredictorConfig,
    progress: JobProgress,
    executor: Executor,
) -> Trained:
    """Train what is found; the version's models that the request leaves alone stay.

    A model is kept, not trained again, where neither its rows and parameters nor what it borrows
    from other devices have changed. The others are trained by workers, the largest first. Of some
    the points are kept, to be trained when a question needs them: see `_find_at_once`.

    Raises:
        CancelledJobError: the job was cancelled.

    """
    before = known.series
    points = {series.key: series for series in found}
    kept = [head for key, head in before.heads.items() if not _is_asked(key, request)]

    def find(key: SeriesKey) -> Series:
        return points[key] if key in points else before.read_series(key)

    packed = {head.content_hash: before.packed(head.key) for head in kept}
    heads = {head.key: head for head in kept}
    sizes = {it.key: it.num_points for it in kept} | {it.key: it.num_points for it in found}
    pools = dict(_find_pools(found, DonorLibrary(sizes, find, request.seed), progress))
    for series in found:
        own = hash_transfer(series, pools[series.key], config, request.seed)
        heads[series.key] = series.head(own)
    heads = dict(sorted(heads.items()))
    single = [head.key for head in own_heads(tuple(heads.values()))]
    at_once = _find_at_once(heads, pools)
    waiting, num_reused = list[tuple[Series, DonorPool | None]](), 0
    for series in found:
        content_hash = heads[series.key].content_hash
        if series.key not in at_once:
            packed[content_hash] = pack_points(series, config, request.seed)
            num_reused += known.has(content_hash)
        elif (same := known.find(content_hash)) is None:
            waiting.append((series, pools[series.key]))
        else:
            packed[content_hash] = same
            num_reused += 1
    waiting.sort(key=lambda item: -item[0].num_points)
    for key, content in _train_all(waiting, config, request.seed, progress, executor):
        packed[heads[key].content_hash] = content
        known.keep(bytes.fromhex(heads[key].content_hash), content)
    after = StoredSeries(heads, packed)
    progress.update(_READ_RATIO + _SERIES_RATIO, "learning typical efficiencies")
    transfers = train_transfers(map(find, single), config, request.seed, executor)
    reported = [key for key in single if key in at_once and key in points]
    return Trained(
        models=ModelSet(series=after, transfers=transfers),
        trained=tuple(head for key, head in heads.items() if key in at_once),
        num_reused=num_reused,
        reports=merge_reports(map(after.read_report, reported)),
    )


def _find_at_once(
    heads: Mapping[SeriesKey, SeriesHead], pools: Mapping[SeriesKey, DonorPool | None]
) -> AbstractSet[SeriesKey]:
    """Return the series that do not wait for a question.

    Those wait that unite software or pick a kernel, and so repeat others, or are of a version of
    which there is a newer one, unless other devices teach them.
    """
    newest = (head.key for head in newest_heads(tuple(heads.values())))
    return {*newest, *(key for key, pool in pools.items() if pool is not None)}


def _find_pools(
    found: Sequence[Series], library: DonorLibrary, progress: JobProgress
) -> Iterator[tuple[SeriesKey, DonorPool | None]]:
    """Yield what every series may borrow from."""
    for series in found:
        progress.update(_READ_RATIO, "looking for models that are there")
        yield series.key, library.find(series.key) if may_transfer(series) else None


def _train_all(
    waiting: Sequence[tuple[Series, DonorPool | None]],
    config: PredictorConfig,
    seed: int,
    progress: JobProgress,
    executor: Executor,
) -> Iterator[tuple[SeriesKey, bytes]]:
    """Yield the packed model of every series as it is done."""
    num_points = sum(series.num_points for series, _ in waiting)
    num_done = done = 0

    def tell() -> None:
        ratio = done / num_points if num_points else 1.0
        label = f"trained {num_done:,} of {len(waiting):,} series"
        progress.update(_READ_RATIO + _SERIES_RATIO * ratio, label)

    for place, content in executor.run(train_item, waiting, (config, seed), tell):
        series = waiting[place][0]
        num_done += 1
        done += series.num_points
        yield series.key, content
    tell()


def train_item(item: tuple[Series, DonorPool | None], shared: tuple[PredictorConfig, int]) -> bytes:
    """Return the packed model of a series: a task of an executor."""
    config, seed = shared
    return pack_model(train_transfer_series(*item, config, seed))


def _is_asked(key: SeriesKey, request: TrainRequest) -> bool:
    return request.device in ("", key.device) and request.operator in ("", key.operator)
