"""Laws of the predictor, whatever was measured and whatever is asked."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Phase,
    Provenance,
)
from foretoken.domain.operators.spec.operator import all_operators, find_operator
from foretoken.domain.units import US_PER_S
from foretoken.predictor.config import BoosterConfig, PredictorConfig
from foretoken.predictor.estimator import Estimator
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.model_store import write_models
from foretoken.predictor.regression.trees import Trees
from foretoken.predictor.roofline import compute_limits
from foretoken.predictor.series import Series, SeriesKey, build_series
from foretoken.predictor.trainer import MIN_ROOFLINE_RATIO, train_series
from foretoken.predictor.transfer import TransferModel, train_transfers
from foretoken.predictor.transfer.efficiency_prior import transfer_names
from foretoken.predictor.transfer.support import Support

Calls = Sequence[Sequence[int]]

_CONFIG = PredictorConfig(state_folder="", booster=BoosterConfig(num_trees=20))
_GEMM = SeriesKey("gemm", "a30", "", "fp16", "forward", "vllm")
_ALL_REDUCE = SeriesKey("all_reduce", "a100_sxm_80", "a100_dgx", "", "forward", "vllm")

gemm_calls = st.lists(
    st.tuples(st.integers(1, 2**17), st.integers(1, 2**17), st.integers(1, 2**17)),
    min_size=1,
    max_size=40,
)
all_reduce_calls = st.lists(
    st.tuples(st.integers(1, 2**32), st.integers(1, 8), st.integers(1, 64)),
    min_size=1,
    max_size=40,
)


def _noisy_series(key: SeriesKey, points: np.ndarray, seed: int) -> Series:
    """Return points measured at 0.6 to 10 times their base latency."""
    columns = dict(zip(key.spec.dim_names, points.T, strict=True))
    slowdown = np.random.default_rng(seed).uniform(0.6, 10.0, len(points))
    return build_series(
        key, points, compute_limits(key.spec, columns, key.target).base_us * slowdown
    )


def _series(seed: int) -> list[Series]:
    rng = np.random.default_rng(seed)
    gemms = np.unique(2 ** rng.integers(3, 13, (150, 3)), axis=0)
    sizes = 2 ** np.arange(10, 30)
    reductions = np.stack([sizes, np.full(20, 4), np.ones(20, np.int64)], axis=1)
    return [_noisy_series(_GEMM, gemms, seed), _noisy_series(_ALL_REDUCE, reductions, seed)]


def _train(seed: int, series: list[Series] | None = None) -> ModelSet:
    models = [train_series(item, _CONFIG, seed) for item in series or _series(seed)]
    return ModelSet(
        version="laws",
        series={model.series.key: model for model in models},
        transfers=train_transfers([model.series for model in models], _CONFIG, seed),
    )


@cache
def _estimator() -> Estimator:
    return Estimator(_train(0))


def _ask(operator: str, device: str, calls: Calls) -> LatencyColumns:
    columns = dict(zip(find_operator(operator).dim_names, np.array(calls).T, strict=True))
    table = OperatorTable(operator=operator, dtype=DType.FP16, columns=columns)
    reply = _estimator().predict(LatencyQuery(device=device, tables=(table,)))
    return reply.tables[0]


@pytest.mark.parametrize("device", ["a30", "h200_sxm"])
@given(calls=gemm_calls)
def test_no_estimate_is_below_the_stated_share_of_the_roofline(device: str, calls: Calls) -> None:
    estimates = _ask("gemm", device, calls)
    spec = find_operator("gemm")
    columns = dict(zip(spec.dim_names, np.array(calls).T, strict=True))
    target = SeriesKey("gemm", device, "", "fp16", "forward", "").target
    least_us = MIN_ROOFLINE_RATIO * compute_limits(spec, columns, target).roofline_us
    assert (estimates.latency_us >= least_us * (1 - 1e-12)).all()


_STREAMED = [
    (name, phase)
    for name, spec in all_operators().items()
    if not spec.is_collective and spec.group != "moe" and list(spec.sweep(False))
    for phase in Phase
    if phase is Phase.FORWARD or spec.work_ratio(phase)
]


@pytest.mark.parametrize(("name", "phase"), _STREAMED)
@pytest.mark.parametrize("device", ["a30", "h200_sxm", "b200"])
def test_nobody_is_predicted_to_move_bytes_faster_than_a_memory_does(
    name: str, device: str, phase: Phase
) -> None:
    spec = find_operator(name)
    calls = list(spec.sweep(False))
    columns = {dim: np.array([call[dim] for call in calls]) for dim in spec.dim_names}
    # What others show: a twentieth of the roofline.
    fast = TransferModel(Trees(float(np.log(0.05))), -0.1, 0.1, Support())
    names = transfer_names(spec, find_device(device), "", DType.FP16)
    models = ModelSet(version="fast", series={}, transfers=dict.fromkeys(names, fast))
    table = OperatorTable(operator=name, dtype=DType.FP16, phase=phase, columns=columns)
    reply = Estimator(models).predict(LatencyQuery(device=device, tables=(table,)))
    target = SeriesKey(name, device, "", "fp16", phase.name.lower(), "").target
    memory_us = compute_limits(spec, columns, target).memory_us
    moved_bytes = memory_us * target.device.memory_bandwidth_bytes_per_s / US_PER_S
    is_beyond_cache = moved_bytes > target.device.l2_cache_bytes
    assert is_beyond_cache.any()
    assert (reply.tables[0].latency_us >= memory_us)[is_beyond_cache].all()


@given(calls=gemm_calls)
def test_bounds_enclose_the_estimate(calls: Calls) -> None:
    for device in ("a30", "h200_sxm"):
        estimates = _ask("gemm", device, calls)
        assert (estimates.low_us > 0).all()
        assert (estimates.low_us <= estimates.latency_us).all()
        assert (estimates.latency_us <= estimates.high_us).all()
        assert np.isfinite(estimates.high_us).all()


@given(calls=all_reduce_calls)
def test_bounds_enclose_the_estimate_of_a_collective(calls: Calls) -> None:
    estimates = _ask("all_reduce", "a100_sxm_80", calls)
    assert (estimates.low_us > 0).all()
    assert (estimates.low_us <= estimates.latency_us).all()
    assert (estimates.latency_us <= estimates.high_us).all()


@given(calls=gemm_calls, seed=st.integers(0, 2**32 - 1))
def test_the_order_of_rows_does_not_matter(calls: Calls, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(calls))
    straight = _ask("gemm", "a30", calls)
    shuffled = _ask("gemm", "a30", [calls[i] for i in order])
    assert straight.latency_us[order].tolist() == shuffled.latency_us.tolist()
    assert straight.provenance[order].tolist() == shuffled.provenance.tolist()


@given(calls=gemm_calls)
def test_a_row_answers_alone_as_in_company(calls: Calls) -> None:
    together = _ask("gemm", "a30", calls)
    alone = [_ask("gemm", "a30", [call]).latency_us[0] for call in calls[:3]]
    # Few calls are answered by other code than many, the same but for the last bits.
    assert alone == pytest.approx(together.latency_us[:3].tolist(), rel=1e-9)


def test_only_measured_points_are_called_measured() -> None:
    series = _series(0)[0]
    measured = _ask("gemm", "a30", series.points)
    assert (measured.provenance == Provenance.MEASURED.value).all()
    others = _ask("gemm", "a30", series.points + np.array([1, 0, 0]))
    assert (others.provenance != Provenance.MEASURED.value).all()


@settings(max_examples=3)
@given(seed=st.integers(0, 1000))
def test_same_seed_and_rows_same_bytes(seed: int) -> None:
    archives = []
    for reverse in (False, True):
        series = _series(seed)
        if reverse:  # The catalog may return rows in another order.
            series = [build_series(s.key, s.points[::-1], s.latency_us[::-1]) for s in series]
        archives.append(write_models(_train(seed, series)))
    assert archives[0] == archives[1]
    assert write_models(_train(seed + 1)) != archives[0]
