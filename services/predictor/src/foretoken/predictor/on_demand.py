"""Train the series that a question needs: measured, and in no version of the models.

What is learned lies in a folder, a file per series, named by the identity of its training as the
members of a version are. Files appear whole, so processes share them without a lock, and a training
of everything takes over what it finds.
"""

import hashlib
import json
import logging
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from foretoken.domain.call_scope import beyond_call
from foretoken.domain.errors import ForetokenError
from foretoken.domain.measurements.estimate import LatencyQuery
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.jobs.progress import tell_job
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.head_index import Subject
from foretoken.predictor.learned_folder import LearnedFolder
from foretoken.predictor.learned_models import LearnedModels, subjects_of
from foretoken.predictor.model_set import ModelSet, own_heads
from foretoken.predictor.model_store import (
    StoredSeries,
    read_models,
    training_label,
    write_models,
)
from foretoken.predictor.packed_model import pack_model, pack_points, unpack_points
from foretoken.predictor.series import Series, SeriesHead, SeriesKey
from foretoken.predictor.trainer import hash_training, train_series
from foretoken.predictor.transfer import train_transfers

if TYPE_CHECKING:
    from foretoken.domain.ports import CatalogPort

_log = logging.getLogger(__name__)

# The seed of a training that nobody asked for is that of one that is asked for without a seed.
_SEED = 0
# Subjects whose rows stay in memory while their series are trained one by one.
_MAX_READ = 8
_REVISION_LENGTH = 12
_SUBJECTS, _OUTLINE = "subjects", "outline"


@dataclass(frozen=True, slots=True)
class _Place:
    """A subject as it was measured when the catalog had a revision."""

    revision: str
    operator: str
    device: str


class Learner:
    """Trains what questions need of what was measured and is in no version."""

    def __init__(
        self, catalog: "CatalogPort", kept: LearnedFolder, config: PredictorConfig
    ) -> None:
        """Keep the ports, and the folder for what is learned."""
        self._catalog, self._config = catalog, config
        self.kept = kept
        self._lock = threading.RLock()
        self._looked_s = -float("inf")
        self._revision = ""
        self._subjects: Mapping[Subject, AbstractSet[str]] = {}
        self._known = ModelSet(), frozenset[Subject]()
        self._completed = ModelSet(), ModelSet()
        self._learned: dict[_Place, ModelSet] = {}
        self._read: OrderedDict[_Place, Mapping[SeriesKey, Series]] = OrderedDict()

    def complete(self, models: ModelSet, query: LatencyQuery | None = None) -> ModelSet:
        """Return the models, and with them what can be learned of all else that was measured.

        Operators on devices of which there is any model are left to a training: where a query is
        about these alone the models answer as they are, and the catalog is not read.
        """
        if not self._config.train_on_demand:
            return models
        if query is not None and subjects_of(query) <= self._find_known(models):
            return models
        with self._lock:
            if self._look() or self._completed[0] is not models:
                self._completed = models, self._complete(models, self._revision)
            return self._completed[1]

    def _complete(self, models: ModelSet, revision: str) -> ModelSet:
        known = self._find_known(models)
        missing = {item: names for item, names in self._subjects.items() if item not in known}
        if not missing:
            return models

        def learn(subject: Subject) -> ModelSet:
            return self._learn(_Place(revision, *subject))

        version = f"on-demand-{revision}"
        return LearnedModels(
            version=f"{models.version}.{version}" if models.version else version,
            created_at=models.created_at,
            snapshot_hash=models.snapshot_hash,
            series=models.series,
            transfers=models.transfers,
            missing=missing,
            learn=learn,
        )

    def _find_known(self, models: ModelSet) -> frozenset[Subject]:
        """Return the subjects that models have."""
        known = self._known
        if known[0] is not models:
            subjects = ((head.key.operator, head.key.device) for head in models.heads)
            known = self._known = models, frozenset(subjects)
        return known[1]

    def _look(self) -> bool:
        """Note now and then what the catalog has measured; tell whether that is something else.

        A catalog that is away changes nothing.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s < self._config.refresh_s:
            return False
        self._looked_s = now_s
        try:
            runs = repr(self._catalog.list_runs()).encode()
            revision = hashlib.sha256(runs).hexdigest()[:_REVISION_LENGTH]
            if revision == self._revision:
                return False
            self._subjects = self._find_subjects(revision)
        except ForetokenError as err:
            _log.warning("nothing new is trained on demand: %s", err.message)
            return False
        self._revision = revision
        return True

    def _find_subjects(self, revision: str) -> Mapping[Subject, AbstractSet[str]]:
        """Return what the catalog has measured, and under which software.

        Kept for the next process: of all of NVIDIA's tables it takes a second to count the rows.
        """
        path = self.kept.path / f"{revision}.{_SUBJECTS}"
        with suppress(FileNotFoundError, ValueError):
            content = json.loads(path.read_bytes())
            self.kept.note_read(path)
            return {(op, device): {*names} for op, device, names in content}
        found: dict[Subject, set[str]] = {}
        for item in self._catalog.describe_coverage():
            if item.num_rows > item.num_flagged + item.num_failed:
                found.setdefault((item.operator, item.device), set()).update(item.frameworks)
        rows = [[*subject, sorted(names)] for subject, names in sorted(found.items())]
        self.kept.write(path, json.dumps(rows).encode())
        return found

    def _learn(self, place: _Place) -> ModelSet:
        """Return the models of a subject, each trained when first asked for."""
        with self._lock:
            if place not in self._learned:
                outline = self._outline(place)
                heads = {head.key: head for head in outline.heads}
                keys = {head.content_hash: head.key for head in outline.heads}
                members = _TrainedMembers(self.kept, keys, partial(self._train, place))
                points = partial(self._read_points, place, heads)
                learned = replace(outline, series=StoredSeries(heads, members, None, points))
                self._learned[place] = learned
            return self._learned[place]

    def _outline(self, place: _Place) -> ModelSet:
        """Return which series there are, and how efficient such calls typically are."""
        said = repr((place, self._config.booster, self._config.min_rows, self._config.max_rows))
        name = hashlib.sha256(said.encode()).hexdigest()
        path = self.kept.path / f"{name}.{_OUTLINE}"
        if not path.exists():
            found = self._read_rows(place)
            heads = {
                key: series.head(hash_training(series, self._config, _SEED))
                for key, series in found.items()
            }
            single = [found[head.key] for head in own_heads(tuple(heads.values()))]
            transfers = train_transfers(single, self._config, _SEED)
            outline = ModelSet(series=StoredSeries(heads, {}), transfers=transfers)
            self.kept.write(path, write_models(outline, has_members=False))
        self.kept.note_read(path)
        return read_models(path)

    def _train(self, place: _Place, key: SeriesKey) -> bytes:
        """Train a series, keep it by what it was trained on, and return it packed."""
        with self._lock:
            series = self._read_rows(place)[key]
        label = training_label(key)
        _log.info("%s: points=%d", label, series.num_points)
        packed = pack_model(
            train_series(series, self._config, _SEED, heartbeat=lambda: tell_job(label))
        )
        self.kept.keep(hash_training(series, self._config, _SEED), packed)
        return packed

    def _read_points(
        self, place: _Place, heads: Mapping[SeriesKey, SeriesHead], key: SeriesKey
    ) -> Series:
        """Return the points of a series; kept, so that not every process reads all rows again."""
        name = heads[key].content_hash
        for kept in (name, f"{name}-points"):
            with suppress(KeyError, zlib.error):
                return unpack_points(heads[key], self.kept[kept])
        with self._lock:
            series = self._read_rows(place)[key]
        self.kept.keep(f"{name}-points", pack_points(series, self._config, _SEED))
        return series

    def _read_rows(self, place: _Place) -> Mapping[SeriesKey, Series]:
        """Return the series of a subject; rows of the subjects read last stay in memory."""
        if place not in self._read:
            # What reads rows takes long to load; few answers that come from kept models need it.
            from foretoken.predictor.training_rows import read_series

            label = f"reading {place.operator} of {place.device}, which no model was trained on"
            tell_job(label)
            _log.warning("%s; `foretoken train` trains all at once", label)
            selection = MeasurementFilter(operator=place.operator, device=place.device)
            # What is learned is kept: a caller that comes again finds it.
            with beyond_call():
                found = read_series(self._catalog.read_measurements(selection))
            self._read[place] = {series.key: series for series in found}
        self._read.move_to_end(place)
        while len(self._read) > _MAX_READ:
            self._read.popitem(last=False)
        return self._read[place]


class _TrainedMembers(Mapping[str, bytes]):
    """The packed models of a subject's series, trained where they are not kept."""

    def __init__(
        self,
        kept: LearnedFolder,
        keys: Mapping[str, SeriesKey],
        train: Callable[[SeriesKey], bytes],
    ) -> None:
        self._kept, self._keys, self._train = kept, keys, train

    def __getitem__(self, content_hash: str) -> bytes:
        try:
            return self._kept[content_hash]
        except (KeyError, zlib.error):
            return self._train(self._keys[content_hash])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
