"""Models as files of a folder: the same models give the same files.

manifest.json                  series, their reports, and transfer models
<series hash>.npz              points, latencies, regressor and calibration of a series
<series hash>-<name>.txt       trees, in LightGBM's own format
"""

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.domain import schema
from foretoken.domain.archive import Archive
from foretoken.domain.errors import NotTrainedError
from foretoken.domain.name import path_inside
from foretoken.domain.results.report import OperatorTrainingReport
from foretoken.predictor.features import FEATURE_REVISION
from foretoken.predictor.intervals.calibration import Calibration
from foretoken.predictor.intervals.coverage import map_coverage
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.neighbours import PointIndex
from foretoken.predictor.regression.curves import CurveRegressor, has_curves
from foretoken.predictor.regression.monotone import build_floor
from foretoken.predictor.regression.prediction import Regressor, RegressorState
from foretoken.predictor.regression.series_regressor import SeriesRegressor
from foretoken.predictor.regression.trees import Trees
from foretoken.predictor.trainer import SeriesModel
from foretoken.predictor.training_rows import Series, SeriesKey
from foretoken.predictor.transfer import TransferModel
from foretoken.predictor.transfer.device_transfer import is_device_transfer, own_state, restore
from foretoken.predictor.transfer.support import Support

# Raised when what is written changes; features have a revision of their own.
_FORMAT_REVISION = 3
_REVISION = [_FORMAT_REVISION, FEATURE_REVISION]
# What the arrays of a regressor are named after, in addition to those of its series.
_REGRESSOR = "regressor_"


def write_models(folder: Path, models: ModelSet) -> None:
    """Write models into a folder; the same models give the same files."""
    series = [_write_series(folder, model) for model in models.series.values()]
    transfers = [
        _write_transfer(folder, index, name, transfer)
        for index, (name, transfer) in enumerate(sorted(models.transfers.items()))
    ]
    manifest = {"revision": _REVISION, "series": series, "transfers": transfers}
    _write_json(folder / "manifest.json", manifest)


def read_models(folder: Path, num_threads: int) -> ModelSet:
    """Return the models of a folder, without what is known of their version.

    Raises:
        NotTrainedError: another release wrote them, whose features mean something else.

    """
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    if manifest.get("revision") != _REVISION:
        raise NotTrainedError(f"another release trained the models of {folder.name}; train again")
    models = [_read_series(folder, item, num_threads) for item in manifest["series"]]
    return ModelSet(
        series={model.series.key: model for model in models},
        transfers={
            item["name"]: _read_transfer(folder, item, num_threads)
            for item in manifest["transfers"]
        },
    )


def _write_series(folder: Path, model: SeriesModel) -> dict[str, Any]:
    series, calibration, state = model.series, model.calibration, model.regressor.to_state()
    arrays: dict[str, npt.NDArray[Any]] = {
        "points": series.points,
        "latency_us": series.latency_us,
        "bin_edges_us": calibration.bin_edges_us,
        "bin_ratio": calibration.bin_ratio,
        "tier_log": calibration.tier_log,
        **{f"{_REGRESSOR}{name}": array for name, array in state.arrays.items()},
    }
    entry: dict[str, Any] = {
        "key": astuple(series.key),
        "hash": model.content_hash,
        "noise_log": series.noise_log,
        "kernels": series.kernels,
        "min_roofline_ratio": model.min_roofline_ratio,
        "floor_slack_ratio": model.floor.slack_ratio,
        "spread_power": calibration.spread_power,
        "numbers": dict(state.numbers),
        "texts": sorted(state.texts),
        "report": schema.encode(model.report),
    }
    for name, text in state.texts.items():
        (folder / _text_name(model.content_hash, name)).write_text(text, encoding="utf-8")
    _write_arrays(folder / f"{model.content_hash}.npz", arrays)
    return entry


def _read_series(folder: Path, entry: Mapping[str, Any], num_threads: int) -> SeriesModel:
    key = SeriesKey(*entry["key"])
    arrays = _read_arrays(path_inside(folder, f"{entry['hash']}.npz"))
    series = Series(
        key=key,
        points=arrays["points"],
        latency_us=arrays["latency_us"],
        noise_log=entry["noise_log"],
        kernels=tuple(entry["kernels"]),
    )
    return SeriesModel(
        series=series,
        regressor=_read_regressor(folder, entry, arrays, num_threads),
        index=PointIndex(series.points),
        coverage=map_coverage(key.spec, series.design),
        calibration=Calibration(
            arrays["bin_edges_us"], arrays["bin_ratio"], entry["spread_power"], arrays["tier_log"]
        ),
        min_roofline_ratio=entry["min_roofline_ratio"],
        floor=build_floor(key.spec, series.points, series.latency_us, entry["floor_slack_ratio"]),
        content_hash=entry["hash"],
        report=schema.decode(OperatorTrainingReport, entry["report"]),
    )


def _read_regressor(
    folder: Path,
    entry: Mapping[str, Any],
    arrays: Mapping[str, npt.NDArray[Any]],
    num_threads: int,
) -> Regressor:
    own = {
        name.removeprefix(_REGRESSOR): array
        for name, array in arrays.items()
        if name.startswith(_REGRESSOR)
    }
    texts = {
        name: path_inside(folder, _text_name(entry["hash"], name)).read_text("utf-8")
        for name in entry["texts"]
    }
    state = RegressorState(own, texts, entry["numbers"])
    if has_curves(SeriesKey(*entry["key"]).spec):
        return CurveRegressor.from_state(state)
    if not is_device_transfer(state):
        return SeriesRegressor.from_state(state, num_threads)
    return restore(SeriesRegressor.from_state(own_state(state), num_threads), state, num_threads)


def _text_name(content_hash: str, name: str) -> str:
    return f"{content_hash}-{name.replace(':', '-')}.txt"


def _write_transfer(folder: Path, index: int, name: str, transfer: TransferModel) -> dict[str, Any]:
    return {
        "name": name,
        "low_log": transfer.low_log,
        "high_log": transfer.high_log,
        "support": schema.encode(transfer.support),
        "trees": _write_trees(folder, f"transfer-{index}", transfer.trees),
    }


def _read_transfer(folder: Path, entry: Mapping[str, Any], num_threads: int) -> TransferModel:
    trees = _read_trees(folder, entry["trees"], num_threads)
    support = schema.decode(Support, entry["support"])
    return TransferModel(trees, entry["low_log"], entry["high_log"], support)


def _write_trees(folder: Path, name: str, trees: Trees) -> dict[str, Any]:
    if trees.text:
        (folder / f"{name}.txt").write_text(trees.text, encoding="utf-8")
    return {"constant": trees.constant, "file": f"{name}.txt" if trees.text else ""}


def _read_trees(folder: Path, entry: Mapping[str, Any], num_threads: int) -> Trees:
    text = path_inside(folder, entry["file"]).read_text("utf-8") if entry["file"] else ""
    return Trees.load(text, entry["constant"], num_threads)


def _write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    # An archive as numpy reads it; zip entries carry a fixed date, so equal arrays, equal bytes.
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue())


def _read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    archive = Archive.open(path.read_bytes())
    return {
        name.removesuffix(".npy"): np.lib.format.read_array(
            io.BytesIO(archive[name]), allow_pickle=False
        )
        for name in archive
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
