"""Which measurements answer, and what a few own points make of other measurements' answers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predictor_fakes import MakePredictor, Train, columns_of, gemm_rows

from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Provenance,
)
from foretoken.predictor.service import PredictorService
from foretoken.predictor.transfer.own_points import (
    Places,
    Reference,
    learn_correction,
    mix_answers,
    own_share,
)

_VLLM = {"framework": "vllm", "framework_version": "0.24.0"}
_TORCH = {"framework": "pytorch", "framework_version": "2.9.0"}
_POINT = {"m": 160, "n": 4096, "k": 1024}
# How much slower than the sibling's the device's own kernels are.
_OWN_RATIO = 1.25


def _rough(dims: dict[str, int]) -> float:
    """Return a slowdown that jumps from size to size, as no few points tell."""
    return 1.5 + 0.6 * float(np.sin(7.0 * dims["m"] ** 0.5 + dims["n"] + 3 * dims["k"]))


def _ask(service: PredictorService, prefer_measured: bool = True, **point: int) -> LatencyColumns:
    table = OperatorTable(operator="gemm", dtype=DType.FP16, columns=columns_of(point))
    query = LatencyQuery(
        device="h100_sxm",
        tables=(table,),
        preferred_framework="vllm 0.24.0",
        prefer_measured=prefer_measured,
    )
    return service.predict(query).tables[0]


def test_the_software_asked_for_counts_for_more_than_the_nearest_data_sheet(
    make_predictor: MakePredictor, train: Train
) -> None:
    """A GH200's products are nearest to an H100's, but PyTorch measured them."""
    rows = gemm_rows(lambda _: 9.0, device="gh200", **_TORCH)
    service = make_predictor([*rows, *gemm_rows(device="h200_sxm", **_VLLM)])
    train(service)
    found = _ask(service, **_POINT)
    assert "h200_sxm" in found.basis
    assert "gh200" not in found.basis
    assert [Provenance.TRANSFERRED.value] == found.provenance.tolist()


def test_few_own_points_correct_a_sibling_rather_than_replace_it(
    make_predictor: MakePredictor, train: Train
) -> None:
    sibling = gemm_rows(_rough, device="h200_sxm", **_VLLM)
    every = gemm_rows(lambda dims: _OWN_RATIO * _rough(dims), device="h100_sxm", **_VLLM)
    truth_us = {tuple(row["dims"].values()): row["latency_us_median"] for row in every}
    own = every[::5]
    service = make_predictor([*sibling, *own])
    train(service)
    known = {tuple(row["dims"].values()) for row in own}
    unseen = [place for place in truth_us if place not in known]
    off = [
        float(_ask(service, m=m, n=n, k=k).latency_us[0]) / truth_us[m, n, k] - 1.0
        for m, n, k in unseen
    ]
    assert np.abs(off).mean() < 0.12
    found = _ask(service, m=unseen[0][0], n=unseen[0][1], k=unseen[0][2])
    assert f"corrected by {len(own)} own points" in found.basis
    m, n, k = next(iter(known))
    measured = _ask(service, m=m, n=n, k=k)
    assert truth_us[m, n, k] == pytest.approx(float(measured.latency_us[0]), rel=1e-5)
    assert [Provenance.MEASURED.value] == measured.provenance.tolist()


def test_what_was_asked_before_does_not_change_an_answer(
    make_predictor: MakePredictor, train: Train
) -> None:
    sibling = gemm_rows(_rough, device="h200_sxm", **_VLLM)
    own = gemm_rows(lambda dims: _OWN_RATIO * _rough(dims), device="h100_sxm", **_VLLM)[::5]
    found = []
    for asks_before in (False, True):
        service = make_predictor([*sibling, *own])
        train(service)
        if asks_before:
            _ask(service, **_POINT)
        found.append(_ask(service, prefer_measured=False, **_POINT))
    assert "own points" in found[0].basis
    assert found[0].latency_us.tolist() == found[1].latency_us.tolist()


def _answers(latency_us: np.ndarray, width: float = 1.3) -> LatencyColumns:
    return LatencyColumns(
        latency_us=latency_us,
        low_us=latency_us / width,
        high_us=latency_us * width,
        provenance=np.full(len(latency_us), Provenance.TRANSFERRED.value),
        nearest_us=latency_us,
        nearest_octaves=np.zeros(len(latency_us)),
        basis="a reference",
    )


def _refer(times_us: np.ndarray, axes: np.ndarray, voices: np.ndarray | None = None) -> Reference:
    places = Places.of_axes(axes) if voices is None else Places(axes, voices)
    return Reference(_answers(times_us), places)


def test_own_points_tell_which_voice_of_a_reference_is_right() -> None:
    """Of two relatives, which go each its own way from size to size, the device follows one."""
    rng = np.random.default_rng(3)
    axes, times_us = rng.uniform(0.0, 12.0, (220, 3)), rng.uniform(10, 1e4, 220)
    above_log = 0.3 * rng.standard_normal(220)
    truth_us = times_us * np.exp(above_log)
    voices = np.column_stack([above_log, -above_log])
    own, asked = slice(0, 20), slice(20, None)
    off = []
    for each in (voices, None):
        parts = [
            _refer(times_us[it], axes[it], None if each is None else each[it])
            for it in (own, asked)
        ]
        found = learn_correction(parts[0], truth_us[own]).apply(parts[1])
        off.append(float(np.abs(np.log(found.latency_us / truth_us[asked])).mean()))
    assert off[0] < 0.3 * off[1]


@given(ratio=st.floats(0.7, 1.4), num_points=st.integers(9, 60))
def test_a_reference_that_is_off_by_a_factor_is_corrected_by_it(
    ratio: float, num_points: int
) -> None:
    """The more points, the narrower the interval; the truth is inside."""
    rng = np.random.default_rng(num_points)
    axes, times_us = rng.uniform(0.0, 12.0, (num_points, 3)), rng.uniform(10, 1e4, num_points)
    correction = learn_correction(_refer(times_us, axes), ratio * times_us)
    asked_us = np.array([50.0, 5_000.0])
    found = correction.apply(_refer(asked_us, rng.uniform(2.0, 10.0, (2, 3))))
    assert (np.abs(found.latency_us / (ratio * asked_us) - 1.0) < 0.1).all()
    assert (found.low_us <= ratio * asked_us).all()
    assert (ratio * asked_us <= found.high_us).all()
    assert (found.high_us / found.low_us <= 1.3**2 * (1 + 1e-9)).all()


@pytest.mark.parametrize("outlier", [0.2, 5.0])
def test_one_point_that_is_far_off_moves_no_other(outlier: float) -> None:
    rng = np.random.default_rng(7)
    axes, times_us = rng.uniform(0.0, 12.0, (100, 3)), rng.uniform(10, 1e4, 100)
    measured_us = times_us * rng.normal(1.1, 0.02, 100)
    measured_us[50] *= outlier
    correction = learn_correction(_refer(times_us, axes), measured_us)
    found = correction.apply(_refer(times_us, axes))
    assert np.abs(found.latency_us / times_us / 1.1 - 1.0).max() < 0.05


def test_a_model_that_errs_much_more_adds_nothing() -> None:
    assert 0.0 == own_share(0.12, 0.03)
    assert 0.0 == own_share(np.inf, 0.03)
    assert 0.5 == pytest.approx(own_share(0.04, 0.04))


@given(share=st.floats(0.0, 1.0), own_us=st.floats(1.0, 1e6), other_us=st.floats(1.0, 1e6))
def test_a_mixture_lies_between_its_parts(share: float, own_us: float, other_us: float) -> None:
    own, other = _answers(np.array([own_us]), 2.0), _answers(np.array([other_us]), 1.2)
    found = mix_answers(own, other, share)
    low_us, high_us = sorted((own_us, other_us))
    assert low_us * (1 - 1e-9) <= found.latency_us[0] <= high_us * (1 + 1e-9)
    width = found.high_us[0] / found.low_us[0]
    assert 1.2**2 * (1 - 1e-9) <= width <= 2.0**2 * (1 + 1e-9)


@given(st.floats(0.001, 2.0), st.floats(0.001, 2.0))
def test_the_answer_that_erred_less_weighs_more(own: float, corrected: float) -> None:
    share = own_share(own, corrected)
    assert 0.0 <= share <= 1.0
    assert (share >= 0.5) == (own <= max(corrected, 0.01))
    assert own_share(float("inf"), corrected) == 0.0
