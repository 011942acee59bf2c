"""One model version as one file, from which each series is read when first asked for.

A ZIP file, the same for the same models: an index of what there is, the models of typical
efficiency, and one member per series, named by the identity of its training. A member is a line of
JSON and plain arrays.
"""

import io
import json
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.domain import schema
from foretoken.domain.errors import CorruptCatalogError, NotTrainedError
from foretoken.domain.results.report import OperatorTrainingReport
from foretoken.predictor.features import FEATURE_REVISION
from foretoken.predictor.intervals.calibration import Calibration
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.packing import Arrays, pack, unpack
from foretoken.predictor.regression.curves import CurveRegressor, has_curves
from foretoken.predictor.regression.prediction import Regressor, RegressorState
from foretoken.predictor.regression.series_regressor import SeriesRegressor
from foretoken.predictor.regression.trees import Trees
from foretoken.predictor.trainer import SeriesModel
from foretoken.predictor.training_rows import Series, SeriesHead, SeriesKey
from foretoken.predictor.transfer import TransferModel
from foretoken.predictor.transfer.device_transfer import is_device_transfer, own_state, restore
from foretoken.predictor.transfer.support import Support

# Raised when what is written changes; features have a revision of their own.
_FORMAT_REVISION = 4
STORE_REVISION = [_FORMAT_REVISION, FEATURE_REVISION]
_INDEX, _TRANSFERS = "index.json", "transfers"


class StoredSeries(Mapping[SeriesKey, SeriesModel]):
    """The models of series, each unpacked when first asked for, and then kept."""

    def __init__(self, heads: Mapping[SeriesKey, SeriesHead], packed: Mapping[str, bytes]) -> None:
        """Keep what is known of every series, and what reads their members by name."""
        self.heads = heads
        self._packed = packed
        self._models: dict[SeriesKey, SeriesModel] = {}
        self._lock = threading.Lock()

    def packed(self, key: SeriesKey) -> bytes:
        """Return a series' member as it is stored; reading one raises `CorruptCatalogError`."""
        with _reading(key):
            return self._packed[self.heads[key].content_hash]

    def __getitem__(self, key: SeriesKey) -> SeriesModel:
        """Return the model of a series."""
        head = self.heads[key]
        with self._lock:
            if key not in self._models:
                with _reading(key):
                    self._models[key] = unpack_model(head, self.packed(key))
            return self._models[key]

    def read_series(self, key: SeriesKey) -> Series:
        """Return the points of a series, without its model."""
        with _reading(key):
            meta, arrays = unpack(self.packed(key))
            return _read_points(self.heads[key], meta, arrays)

    def read_report(self, key: SeriesKey) -> OperatorTrainingReport:
        """Return how good the model of a series is."""
        with _reading(key):
            return schema.decode(OperatorTrainingReport, unpack(self.packed(key))[0]["report"])

    def __contains__(self, key: object) -> bool:
        """Tell whether there is such a series, without loading it."""
        return key in self.heads

    def __iter__(self) -> Iterator[SeriesKey]:
        """Yield the keys."""
        return iter(self.heads)

    def __len__(self) -> int:
        """How many series there are."""
        return len(self.heads)


@contextmanager
def _reading(key: SeriesKey) -> Iterator[None]:
    try:
        yield
    except CorruptCatalogError:
        raise
    except Exception as err:  # what is damaged can fail anywhere
        raise CorruptCatalogError(
            f"the model of {key.operator} on {key.device} cannot be read ({err!r}): train again"
        ) from err


class _Members(Mapping[str, bytes]):
    """The members of a ZIP file that may be read by several threads."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)

    def __getitem__(self, name: str) -> bytes:
        return self._archive.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._archive.namelist())

    def __len__(self) -> int:
        return len(self._archive.namelist())


def store_series(series: Mapping[SeriesKey, SeriesModel]) -> StoredSeries:
    """Return models as they are stored."""
    if isinstance(series, StoredSeries):
        return series
    packed = {model.content_hash: pack_model(model) for model in series.values()}
    return StoredSeries({key: model.head for key, model in series.items()}, packed)


def write_models(models: ModelSet, *, has_members: bool = True) -> bytes:
    """Return models as one file; the same models give the same bytes.

    Without members it says which series there are, and has the models of typical efficiency.
    """
    heads = sorted(models.heads, key=lambda head: head.key)
    series = store_series(models.series)
    kept = heads if has_members else []
    members = {head.content_hash: series.packed(head.key) for head in kept}
    arrays: dict[str, npt.NDArray[Any]] = {}
    transfers = []
    for place, (name, transfer) in enumerate(sorted(models.transfers.items())):
        arrays |= transfer.trees.to_arrays(str(place))
        bounds = {"low_log": transfer.low_log, "high_log": transfer.high_log}
        transfers.append({"name": name, "support": schema.encode(transfer.support), **bounds})
    index = {
        "revision": STORE_REVISION,
        "series": [
            [astuple(head.key), head.kernels, head.num_points, head.content_hash] for head in heads
        ],
    }
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        _write_member(archive, _INDEX, json.dumps(index).encode())
        _write_member(archive, _TRANSFERS, pack({"transfers": transfers}, arrays))
        for name, member in sorted(members.items()):
            _write_member(archive, name, member)
    return content.getvalue()


def _write_member(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    # Without a date and with one permission, whenever and by whomever it is written.
    archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


def read_models(path: Path) -> ModelSet:
    """Return the models of a file, without what is known of their version.

    Raises:
        NotTrainedError: another release wrote them, whose features mean something else.

    """
    members = _Members(path)
    index = json.loads(members.get(_INDEX, b"{}"))
    if index.get("revision") != STORE_REVISION:
        raise NotTrainedError(f"another release trained the models of {path.name}; train again")
    heads = {}
    for key, kernels, num_points, content_hash in index["series"]:
        own = SeriesKey(*key)
        heads[own] = SeriesHead(
            key=own, kernels=tuple(kernels), num_points=num_points, content_hash=content_hash
        )
    meta, arrays = unpack(members[_TRANSFERS])
    transfers = {
        item["name"]: TransferModel(
            Trees.from_arrays(str(place), arrays),
            item["low_log"],
            item["high_log"],
            schema.decode(Support, item["support"]),
        )
        for place, item in enumerate(meta["transfers"])
    }
    return ModelSet(series=StoredSeries(heads, members), transfers=transfers)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all; who reads the one before goes on."""
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def pack_model(model: SeriesModel) -> bytes:
    """Return the model of a series as its member."""
    series, calibration, state = model.series, model.calibration, model.regressor.to_state()
    meta = {
        "noise_log": series.noise_log,
        "min_roofline_ratio": model.min_roofline_ratio,
        "floor_slack_ratio": model.floor_slack_ratio,
        "spread_power": calibration.spread_power,
        "numbers": dict(state.numbers),
        "report": schema.encode(model.report),
    }
    arrays: dict[str, npt.NDArray[Any]] = {
        # Column by column, in order: what repeats packs well.
        "points": np.ascontiguousarray(_narrow(series.points).T),
        "latency_us": series.latency_us.astype(np.float32),
        "bin_edges_us": calibration.bin_edges_us,
        "bin_ratio": calibration.bin_ratio,
        "tier_log": calibration.tier_log,
        **{f"regressor:{name}": array for name, array in state.arrays.items()},
    }
    return pack(meta, arrays)


def unpack_model(head: SeriesHead, content: bytes) -> SeriesModel:
    """Return the model of a series from its member."""
    meta, arrays = unpack(content)
    series = _read_points(head, meta, arrays)
    bins = arrays["bin_edges_us"], arrays["bin_ratio"]
    return SeriesModel(
        series=series,
        regressor=_read_regressor(series, meta, arrays),
        calibration=Calibration(*bins, meta["spread_power"], arrays["tier_log"]),
        min_roofline_ratio=meta["min_roofline_ratio"],
        floor_slack_ratio=meta["floor_slack_ratio"],
        content_hash=head.content_hash,
        report=schema.decode(OperatorTrainingReport, meta["report"]),
    )


def _read_points(head: SeriesHead, meta: Mapping[str, Any], arrays: Arrays) -> Series:
    return Series(
        key=head.key,
        points=np.ascontiguousarray(arrays["points"].T, dtype=np.int64),
        latency_us=arrays["latency_us"].astype(np.float64),
        noise_log=meta["noise_log"],
        kernels=head.kernels,
    )


def _read_regressor(series: Series, meta: Mapping[str, Any], arrays: Arrays) -> Regressor:
    own = {
        name.partition(":")[2]: array
        for name, array in arrays.items()
        if name.startswith("regressor:")
    }
    state = RegressorState(own, meta["numbers"])
    if has_curves(series.key.spec):
        return CurveRegressor.from_state(state)
    design = series.design
    log_ratio = np.log(series.latency_us / design.base_us)
    if not is_device_transfer(state):
        return SeriesRegressor.from_state(state, design, log_ratio)
    return restore(SeriesRegressor.from_state(own_state(state), design, log_ratio), state)


def _narrow(points: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return integers in the fewest bytes that hold them."""
    return points.astype(np.min_scalar_type(int(points.max(initial=0))))
