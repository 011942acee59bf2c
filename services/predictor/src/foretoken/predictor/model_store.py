"""Model versions on disk: one folder each, written whole by rename and never changed after.

models/<version>/manifest.json      series, scores and transfer models
models/<version>/<series hash>.npz  points, latencies, regressor and calibration of a series
models/<version>/<name>.txt         trees, in LightGBM's own format
models/<version>/created_at         the one thing two equal trainings do not share
models/active                       the version that answers
"""

import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.domain import schema
from foretoken.domain.ports import ModelVersion
from foretoken.predictor.calibration import Calibration
from foretoken.predictor.coverage import map_coverage
from foretoken.predictor.curves import CurveRegressor
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.neighbours import PointIndex
from foretoken.predictor.regressor import Regressor, TreeRegressor, Trees
from foretoken.predictor.trainer import HeldOutScore, SeriesModel
from foretoken.predictor.training_rows import Series, SeriesKey
from foretoken.predictor.transfer import TransferModel

_VERSION_LENGTH = 16


class ModelStore:
    """The folder of model versions."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        """Keep versions under `folder`."""
        self._folder = folder
        self._num_threads = num_threads

    def open(self) -> None:
        """Make the folder, and remove what an interrupted save left behind."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob("*.partial"):
            shutil.rmtree(leftover)

    def save(self, models: ModelSet) -> None:
        """Write a version, unless it is there already."""
        final = self._folder / models.version
        if final.exists():
            return
        partial = self._folder / f"{models.version}.partial"
        # A save that failed half way, for want of space, must not forbid the next.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        series = [_write_series(partial, model) for model in models.series.values()]
        transfers = [
            _write_transfer(partial, index, name, transfer)
            for index, (name, transfer) in enumerate(sorted(models.transfers.items()))
        ]
        manifest = {
            "version": models.version,
            "snapshot_hash": models.snapshot_hash,
            "num_rows": models.num_rows,
            "series": series,
            "transfers": transfers,
        }
        _write_json(partial / "manifest.json", manifest)
        (partial / "created_at").write_text(models.created_at, encoding="utf-8")
        partial.replace(final)

    def activate(self, version: str) -> None:
        """Make a stored version the one that answers, also after a restart."""
        temporary = self._folder / "active.tmp"
        temporary.write_text(version, encoding="utf-8")
        temporary.replace(self._folder / "active")

    def load_active(self) -> ModelSet:
        """Return the models that answer; the empty set where nothing was trained yet."""
        version = self._active()
        return self.load(version) if version else ModelSet()

    def load(self, version: str) -> ModelSet:
        """Return the models of a stored version."""
        folder = self._folder / version
        manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
        models = [_read_series(folder, item, self._num_threads) for item in manifest["series"]]
        return ModelSet(
            version=version,
            created_at=(folder / "created_at").read_text("utf-8"),
            snapshot_hash=manifest["snapshot_hash"],
            series={model.series.key: model for model in models},
            transfers={
                item["name"]: _read_transfer(folder, item, self._num_threads)
                for item in manifest["transfers"]
            },
        )

    def list(self) -> tuple[ModelVersion, ...]:
        """Return the stored versions, newest first."""
        active = self._active()
        versions = []
        for path in self._folder.glob("*/manifest.json"):
            if path.parent.suffix == ".partial":
                continue
            manifest = json.loads(path.read_text("utf-8"))
            versions.append(
                ModelVersion(
                    version=manifest["version"],
                    created_at=(path.parent / "created_at").read_text("utf-8"),
                    snapshot_hash=manifest["snapshot_hash"],
                    num_rows=manifest["num_rows"],
                    is_active=manifest["version"] == active,
                )
            )
        return tuple(sorted(versions, key=lambda v: (v.created_at, v.version), reverse=True))

    def _active(self) -> str:
        pointer = self._folder / "active"
        return pointer.read_text("utf-8") if pointer.exists() else ""


def version_of(series: Mapping[SeriesKey, SeriesModel]) -> str:
    """Return the version of a set of models: the hash of what each was trained on and how."""
    hashes = sorted(model.content_hash for model in series.values())
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()[:_VERSION_LENGTH]


def _write_series(folder: Path, model: SeriesModel) -> dict[str, Any]:
    series, calibration, regressor = model.series, model.calibration, model.regressor
    arrays: dict[str, npt.NDArray[Any]] = {
        "points": series.points,
        "latency_us": series.latency_us,
        "bin_edges_us": calibration.bin_edges_us,
        "low_log": calibration.low_log,
        "high_log": calibration.high_log,
    }
    entry: dict[str, Any] = {
        "key": astuple(series.key),
        "hash": model.content_hash,
        "noise_log": series.noise_log,
        "min_roofline_ratio": model.min_roofline_ratio,
        "score": schema.encode(model.score),
    }
    if isinstance(regressor, TreeRegressor):
        arrays["residual_log"] = regressor.residual_log
        entry["trees"] = _write_trees(folder, model.content_hash, regressor.trees)
    elif isinstance(regressor, CurveRegressor):
        arrays["curve_points"] = regressor.points
        arrays["smooth_log"] = regressor.smooth_log
    _write_arrays(folder / f"{model.content_hash}.npz", arrays)
    return entry


def _read_series(folder: Path, entry: Mapping[str, Any], num_threads: int) -> SeriesModel:
    key = SeriesKey(*entry["key"])
    with np.load(folder / f"{entry['hash']}.npz") as stored:
        arrays = dict(stored)
    series = Series(
        key=key,
        points=arrays["points"],
        latency_us=arrays["latency_us"],
        noise_log=entry["noise_log"],
    )
    regressor: Regressor
    if "trees" in entry:
        trees = _read_trees(folder, entry["trees"], num_threads)
        regressor = TreeRegressor(trees, arrays["residual_log"])
    else:
        regressor = CurveRegressor(
            arrays["curve_points"], arrays["smooth_log"], np.zeros(len(series.points))
        )
    return SeriesModel(
        series=series,
        regressor=regressor,
        index=PointIndex(series.points),
        coverage=map_coverage(key.spec, series.points),
        calibration=Calibration(arrays["bin_edges_us"], arrays["low_log"], arrays["high_log"]),
        min_roofline_ratio=entry["min_roofline_ratio"],
        content_hash=entry["hash"],
        score=schema.decode(HeldOutScore, entry["score"]),
    )


def _write_transfer(folder: Path, index: int, name: str, transfer: TransferModel) -> dict[str, Any]:
    return {
        "name": name,
        "low_log": transfer.low_log,
        "high_log": transfer.high_log,
        "trees": _write_trees(folder, f"transfer-{index}", transfer.trees),
    }


def _read_transfer(folder: Path, entry: Mapping[str, Any], num_threads: int) -> TransferModel:
    trees = _read_trees(folder, entry["trees"], num_threads)
    return TransferModel(trees, entry["low_log"], entry["high_log"])


def _write_trees(folder: Path, name: str, trees: Trees) -> dict[str, Any]:
    if trees.text:
        (folder / f"{name}.txt").write_text(trees.text, encoding="utf-8")
    return {"constant": trees.constant, "file": f"{name}.txt" if trees.text else ""}


def _read_trees(folder: Path, entry: Mapping[str, Any], num_threads: int) -> Trees:
    text = (folder / entry["file"]).read_text("utf-8") if entry["file"] else ""
    return Trees.load(text, entry["constant"], num_threads)


def _write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    # An archive as numpy reads it; zip entries carry a fixed date, so equal arrays, equal bytes.
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue())


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
