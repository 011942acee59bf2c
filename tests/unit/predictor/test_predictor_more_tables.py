"""Tables of more devices and engines never make answers much worse, whoever brings them."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from foretoken.domain.measurements.estimate import DType, LatencyQuery, OperatorTable
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.estimator import Estimator
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.series import Series, SeriesKey, build_series
from foretoken.predictor.trainer import SeriesModel, train_series
from foretoken.predictor.transfer import train_transfers

_SYSTEMS = Path(__file__).parents[4] / "shared" / "data" / "aiconfigurator" / "systems" / "data"
_CONFIG = PredictorConfig(state_folder="")
_DIMS = ("m", "n", "k")
# Of every table, and every so many of these are asked for.
_NUM_POINTS, _ASKED = 600, 6
# How much worse answers may become.
_MOST = 1.05

_Table = tuple[str, str, str]
# Device, folder of the system, engine and version of a table of GEMMs in BF16.
_FOLDERS: Mapping[str, str] = {"a100_sxm_80": "a100_sxm", "b200": "b200_sxm"}
_TABLES: Sequence[_Table] = (
    ("h200_sxm", "vllm", "0.24.0"),
    ("h200_sxm", "trtllm", "1.3.0rc20"),
    ("h100_sxm", "vllm", "0.24.0"),
    ("h100_sxm", "sglang", "0.5.14"),
    ("b200", "vllm", "0.24.0"),
    ("b200", "trtllm", "1.3.0rc20"),
    ("gb200", "vllm", "0.24.0"),
    ("l40s", "vllm", "0.24.0"),
    ("a100_sxm_80", "vllm", "0.14.0"),
)


@cache
def _read(table: _Table) -> Series:
    device, engine, version = table
    folder = _SYSTEMS / _FOLDERS.get(device, device) / "gemm" / engine / version
    rows = pq.read_table(folder / "gemm_perf.parquet")
    is_bf16 = pc.equal(rows["gemm_dtype"].cast("string"), "bfloat16")
    rows = rows.filter(pc.and_(is_bf16, pc.greater(rows["m"].cast("int64"), 0)))
    points = np.stack([rows[name].cast("int64").to_numpy() for name in _DIMS], axis=1)
    key = SeriesKey("gemm", device, "", "bf16", "forward", f"{engine} {version}")
    series = build_series(key, points, 1e3 * rows["latency"].cast("float64").to_numpy())
    drawn = np.random.default_rng(0).choice(series.num_points, _NUM_POINTS, replace=False)
    return series.take(np.sort(drawn))


@cache
def _train(table: _Table, step: int = 1) -> SeriesModel:
    """Return the model of one in `step` points of a table."""
    series = _read(table)
    return train_series(series.take(np.arange(0, series.num_points, step)), _CONFIG, 0)


@cache
def _error(held: _Table, known: tuple[_Table, ...], num_own: int) -> float:
    """Return the mean error on a table left out but for some points, its engine preferred."""
    models = [_train(table) for table in known]
    if num_own:
        models.append(_train(held, _NUM_POINTS // num_own))
    series = {model.series.key: model for model in models}
    transfers = train_transfers([model.series for model in models], _CONFIG, 0)
    held_out = _read(held)
    asked = np.arange(1, _NUM_POINTS, _ASKED)
    columns = dict(zip(_DIMS, held_out.points[asked].T, strict=True))
    query = LatencyQuery(
        device=held_out.key.device,
        preferred_framework=held_out.key.framework,
        tables=(OperatorTable(operator="gemm", dtype=DType.BF16, columns=columns),),
    )
    estimator = Estimator(ModelSet(version="more", series=series, transfers=transfers))
    found = estimator.predict(query).tables[0]
    return float(np.abs(found.latency_us / held_out.latency_us[asked] - 1.0).mean())


@pytest.mark.slow
@pytest.mark.skipif(not _SYSTEMS.exists(), reason="the shared measurements are not there")
@pytest.mark.parametrize("num_own", [0, 100])
@pytest.mark.parametrize(
    "held",
    [("h100_sxm", "vllm", "0.24.0"), ("h200_sxm", "vllm", "0.24.0"), ("b200", "vllm", "0.24.0")],
    ids=lambda held: held[0],
)
def test_no_table_makes_answers_about_a_device_much_worse(held: _Table, num_own: int) -> None:
    """With all tables answers err at most a twentieth more than without any one of them.

    Nor more than without all tables of a device.
    """
    others = tuple(table for table in _TABLES if table[0] != held[0])
    with_all = _error(held, others, num_own)
    fewer = {table: tuple(item for item in others if item != table) for table in others}
    devices = {table[0] for table in others}
    fewer |= {(name, "", ""): tuple(item for item in others if item[0] != name) for name in devices}
    worse = {left_out: with_all / _error(held, known, num_own) for left_out, known in fewer.items()}
    assert {} == {name: ratio for name, ratio in worse.items() if ratio > _MOST}
    assert min(worse.values()) < 0.95
