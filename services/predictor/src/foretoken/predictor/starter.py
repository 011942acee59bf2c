"""The starter catalog: measurements that come with the program, for what nobody measured here.

A folder as `catalog publish` writes it, with an index of the series its rows are, each one after
the other in a file, models of typical efficiency, and what leaving points out taught of a series.
Own measurements always come first: a series of the starter answers where own ones have none of the
same circumstances.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foretoken.domain.errors import InvalidRequestError, NotTrainedError
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.measurements.estimate import DType, LatencyQuery
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.features import FEATURE_REVISION
from foretoken.predictor.learned_folder import LearnedFolder
from foretoken.predictor.model_set import Choice, ModelSet, SeriesByHead, SeriesOnDemand, Wanted
from foretoken.predictor.model_store import read_models
from foretoken.predictor.roofline import Target
from foretoken.predictor.series import Series, SeriesHead, SeriesKey, unite_series
from foretoken.predictor.trainer import SeriesModel, train_series
from foretoken.predictor.transfer import TransferModel
from foretoken.predictor.tuning import Tuning, Tunings, read_tunings

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)

INDEX_NAME = "_series.json.gz"
PRIOR_NAME = "_prior.models"
TUNING_NAME = "_tuning.bin"
# What the version of models that have measurements of the starter ends in.
NAME = "starter"
_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StarterEntry:
    """A series of the starter: `num_points` rows of a file from row `first` on, in order."""

    key: SeriesKey
    kernels: tuple[str, ...]
    num_points: int
    noise_log: float
    file: str
    first: int


def write_index(folder: Path, entries: Sequence[StarterEntry]) -> None:
    """Write the index of a starter's series."""
    rows = [[*entry.key.names, list(entry.kernels), *_place(entry)] for entry in entries]
    text = ",\n".join(json.dumps(row) for row in rows)
    (folder / INDEX_NAME).write_bytes(gzip.compress(f"[\n{text}\n]\n".encode(), mtime=0))


def _place(entry: StarterEntry) -> tuple[int, float, str, int]:
    return entry.num_points, entry.noise_log, entry.file, entry.first


def _read_index(folder: Path) -> tuple[Mapping[SeriesKey, StarterEntry], str]:
    """Return the entries, and the hash of the index.

    Raises:
        InvalidRequestError: the folder is no starter.

    """
    try:
        content = (folder / INDEX_NAME).read_bytes()
    except OSError as err:
        reason = f"{folder} is no starter catalog: {err.strerror}"
        raise InvalidRequestError.of_field("predictor.starter", reason) from err
    entries = {}
    for *names, kernels, num_points, noise_log, file, first in json.loads(gzip.decompress(content)):
        entries[SeriesKey(*names)] = StarterEntry(
            key=SeriesKey(*names),
            kernels=tuple(kernels),
            num_points=num_points,
            noise_log=noise_log,
            file=file,
            first=first,
        )
    return entries, hashlib.sha256(content).hexdigest()


class StarterSeries(SeriesOnDemand):
    """The models of a starter's series, each trained when first asked for, and then kept."""

    def __init__(self, folder: Path, kept: Path, config: PredictorConfig) -> None:
        """Read the index of `folder`; trained models are kept in `kept`.

        Raises:
            InvalidRequestError: the folder is no starter.

        """
        super().__init__()
        self._folder, self._kept, self._config = folder, LearnedFolder(kept), config
        self._entries, index_hash = _read_index(folder)
        self._united = _unite(self._entries)
        parameters = json.dumps([dataclasses.asdict(config.booster), config.min_rows])
        self._identity = f"{index_hash} {FEATURE_REVISION} {parameters}"
        self.heads = {key: self._head([key], key) for key in self._entries}
        self.heads |= {key: self._head(keys, key) for key, keys in self._united.items()}

    def _head(self, keys: Sequence[SeriesKey], key: SeriesKey) -> SeriesHead:
        entries = [self._entries[key] for key in keys]
        identity = f"{self._identity} {key.names}"
        return SeriesHead(
            key=key,
            kernels=tuple(sorted({name for entry in entries for name in entry.kernels})),
            num_points=max(entry.num_points for entry in entries),
            content_hash=hashlib.sha256(identity.encode()).hexdigest(),
            origin=NAME,
        )

    @property
    def entries(self) -> Sequence[StarterEntry]:
        """Where the measurements lie."""
        return tuple(self._entries.values())

    def read_series(self, key: SeriesKey) -> Series:
        """Return the points of a series, without its model."""
        if key in self._united:
            return unite_series(key, [self.read_series(own) for own in self._united[key]])
        # Models are kept, so few questions need the measurements.
        from pyarrow import parquet

        entry, names = self._entries[key], list(key.spec.dim_names)
        # `read_table` takes a quarter of a second to import what reads folders of files.
        with parquet.ParquetFile(self._folder / entry.file) as file:
            table = file.read(columns=[*names, "latency_us_median"])
        table = table.slice(entry.first, entry.num_points)
        return Series(
            key=key,
            points=np.stack([_numbers(table[name]) for name in names], axis=1),
            latency_us=_numbers(table["latency_us_median"]),
            noise_log=entry.noise_log,
            kernels=entry.kernels,
        )

    def load(self, head: SeriesHead) -> SeriesModel:
        """Return the model of a series; the first time it takes a second or two."""
        return self._kept.load(
            head, lambda: self.train(head.key, self._tunings.find(head.content_hash))
        )

    def train(self, key: SeriesKey, tuning: Tuning | None = None) -> SeriesModel:
        """Train a series, as a tuning of it says where there is one."""
        return train_series(self.read_series(key), self._config, _SEED, tuning=tuning)

    @cached_property
    def _tunings(self) -> Tunings:
        return read_tunings(self._folder / TUNING_NAME)


def _numbers(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    # `to_numpy` takes another quarter to import pandas.
    return np.concatenate([np.from_dlpack(chunk) for chunk in column.chunks])


def _unite(entries: Mapping[SeriesKey, StarterEntry]) -> Mapping[SeriesKey, list[SeriesKey]]:
    """Return the series of several frameworks that unite into one, by the key of that one."""
    found: dict[SeriesKey, list[SeriesKey]] = {}
    for key in entries:
        found.setdefault(dataclasses.replace(key, framework=""), []).append(key)
    return {key: keys for key, keys in found.items() if len(keys) > 1}


def open_starter(folder: Path, kept: Path, config: PredictorConfig) -> ModelSet:
    """Return the models of a starter catalog; none is loaded or trained yet.

    Raises:
        InvalidRequestError: the folder is no starter.

    """
    series = StarterSeries(folder, kept, config)
    return ModelSet(version=NAME, series=series, transfers=_read_prior(folder / PRIOR_NAME))


def _read_prior(path: Path) -> Mapping[str, TransferModel]:
    """Return models of typical efficiency; a starter may lack them, or have those of a release."""
    try:
        return read_models(path).transfers if path.exists() else {}
    except NotTrainedError as err:
        _log.warning("the starter's typical efficiencies are not used: %s", err)
        return {}


class _LayeredSeries(SeriesByHead):
    """Own models, and those of the starter of what own ones know nothing of."""

    def __init__(self, own: ModelSet, starter: ModelSet) -> None:
        self._own, self._starter = own.series, starter.series
        known = {head.key.circumstances for head in own.heads}
        self.heads = {
            head.key: head for head in starter.heads if head.key.circumstances not in known
        } | {head.key: head for head in own.heads}

    def __getitem__(self, key: SeriesKey) -> SeriesModel:
        if key not in self.heads:
            raise KeyError(key)
        return self._own[key] if key in self._own else self._starter[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayeredModels(ModelSet):
    """Own models above those of a starter, of which only what own ones lack answers."""

    own: ModelSet
    starter: ModelSet

    @property
    def knows_nothing(self) -> bool:
        """Whether nothing at all was measured."""
        return self.own.knows_nothing and self.starter.knows_nothing

    @property
    def layers(self) -> Sequence[ModelSet]:
        """The own models, and the starter's."""
        return (self.own, self.starter)

    def heads_for(self, query: LatencyQuery) -> Sequence[SeriesHead]:
        """Return the series among which the names in a query are looked up."""
        return (*self.own.heads_for(query), *self.starter.heads_for(query))

    def rank(self, spec: OperatorSpec, target: Target, wanted: Wanted) -> Sequence[Choice]:
        """Return own models; the starter's where own ones are of other code, and its are not."""
        found = self.own.rank(spec, target, wanted)
        if found and not found[0].is_other_code:
            return found
        behind = self.starter.rank(spec, target, wanted)
        is_nearer = bool(behind) and not behind[0].is_other_code
        return behind if is_nearer or not found else found

    def transfer(
        self,
        spec: OperatorSpec,
        device: DeviceSpec,
        variant: str = "",
        dtype: DType | None = None,
    ) -> TransferModel:
        """Return the typical efficiency of an operator: the own one if there is one."""
        has_own = self.own.has_transfer(spec, device, variant)
        return (self.own if has_own else self.starter).transfer(spec, device, variant, dtype)


def layer(own: ModelSet, starter: ModelSet) -> LayeredModels:
    """Return own models above those of a starter; its version says of which."""
    return LayeredModels(
        version=NAME if own.knows_nothing else f"{own.version}+{NAME}",
        created_at=own.created_at,
        snapshot_hash=own.snapshot_hash,
        series=_LayeredSeries(own, starter),
        own=own,
        starter=starter,
    )


def own_version(version: str) -> str:
    """Return the version of the own models in one that `layer` named; empty: there are none."""
    return "" if version == NAME else version.removesuffix(f"+{NAME}")
