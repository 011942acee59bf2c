"""How efficient an operator is where it was not measured: from what, and how uncertain."""

import numpy as np
import pytest
from predictor_fakes import MakePredictor, Train, base_us, gemm_rows

from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
)
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.service import PredictorService
from foretoken.predictor.transfer.efficiency_prior import transfer_names

_ROWS = ("any row operator on a30", "any streaming operator on a30")
_ANY_ROWS = ("any row operator on any gpu", "any streaming operator on any gpu")


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("", ("rms_norm on any gpu", *_ROWS, *_ANY_ROWS)),
        (
            "cache=warm",
            ("rms_norm (cache=warm) on any gpu", "rms_norm on any gpu", *_ROWS, *_ANY_ROWS),
        ),
        ("form=chain", ("rms_norm (form=chain) on any gpu", _ROWS[-1], _ANY_ROWS[-1])),
    ],
)
def test_other_work_is_told_by_the_widest_kind_alone(
    variant: str, expected: tuple[str, ...]
) -> None:
    """A chain of kernels is neither the plain operator nor one kernel that treats rows alike."""
    assert expected == transfer_names(find_operator("rms_norm"), find_device("a30"), variant)


@pytest.mark.parametrize(
    ("slowdown", "expected"), [(1.0, 1.3), (4.0, 4.0)], ids=["they agree", "they do not"]
)
def test_the_doubt_is_what_devices_err_on_one_left_out_but_never_little(
    slowdown: float, expected: float, make_predictor: MakePredictor, train: Train
) -> None:
    """Estimated from the other, one of two devices is too fast by the factor, one too slow."""
    fast = gemm_rows(lambda _: 4.0, device="a30")
    slow = gemm_rows(lambda _: 4.0 * slowdown, device="a100_sxm_80")
    service = make_predictor([*fast, *slow])
    train(service)
    found = _ask_h100(service)
    assert float(found.high_us[0] / found.latency_us[0]) == pytest.approx(expected, rel=0.05)
    assert float(found.latency_us[0] / found.low_us[0]) == pytest.approx(expected, rel=0.05)


_AS_FAST = ("a30", "a100_sxm_80", "l40s", "b200")


def test_a_device_without_the_kernels_neither_moves_others_nor_widens_their_intervals(
    make_predictor: MakePredictor, train: Train
) -> None:
    fast = [row for name in _AS_FAST for row in gemm_rows(lambda _: 2.0, device=name)]
    slow = gemm_rows(lambda _: 40.0, device="rtx_pro_6000")
    answers = []
    for rows in (fast, [*fast, *slow]):
        service = make_predictor(rows)
        train(service)
        answers.append(_ask_h100(service))
    alone, with_slow = answers
    for name in ("latency_us", "low_us", "high_us"):
        assert getattr(alone, name).tolist() == getattr(with_slow, name).tolist()
    assert "gemm on 4 other GPUs, but for slower kernels of rtx_pro_6000" in with_slow.basis


def test_the_products_of_a_chip_are_without_the_kernels_together(
    make_predictor: MakePredictor, train: Train
) -> None:
    """Each alone is what the other tells of it, and one of them is not four times as slow."""
    software = {"framework": "vllm", "framework_version": "0.24.0"}
    fast = ("a30", "l40s", "b200")
    rows = [row for name in fast for row in gemm_rows(lambda _: 2.0, device=name, **software)]
    rows += gemm_rows(lambda _: 7.0, device="a100_sxm_40", **software)
    rows += gemm_rows(lambda _: 40.0, device="a100_sxm_80", **software)
    service = make_predictor(rows)
    train(service)
    places = "a100_sxm_40 under vllm 0.24.0, a100_sxm_80 under vllm 0.24.0"
    assert f"but for slower kernels of {places}" in _ask_h100(service).basis


def test_most_devices_are_never_without_the_kernels(
    make_predictor: MakePredictor, train: Train
) -> None:
    rows = [*gemm_rows(lambda _: 2.0, device="a30"), *gemm_rows(lambda _: 2.0, device="l40s")]
    for name in ("a100_sxm_80", "b200", "rtx_pro_6000"):
        rows += gemm_rows(lambda _: 40.0, device=name)
    service = make_predictor(rows)
    train(service)
    found = _ask_h100(service)
    assert "slower kernels" not in found.basis
    assert found.high_us[0] / found.low_us[0] > 4.0


def test_in_other_formats_a_device_set_apart_may_be_as_slow_as_it_was(
    make_predictor: MakePredictor, train: Train
) -> None:
    rows = [row for name in _AS_FAST for row in gemm_rows(lambda _: 2.0, device=name)]
    rows += gemm_rows(lambda _: 40.0, device="rtx_pro_6000")
    service = make_predictor(rows)
    train(service)
    plain, slow = (_ask(service, name, DType.TF32) for name in ("h100_sxm", "rtx_pro_6000"))
    assert plain.high_us[0] / plain.latency_us[0] < 4.0
    assert 20.0 == pytest.approx(slow.high_us[0] / slow.latency_us[0], rel=0.05)


def test_formats_of_another_width_do_not_say_how_efficient_products_are(
    make_predictor: MakePredictor, train: Train
) -> None:
    """However many devices measured them: kernels of FP8 reach another share of their peak."""
    products = [row for name in ("a30", "a100_sxm_80") for row in gemm_rows(lambda _: 2.0, name)]
    others = ("l40s", "b200", "gb200")
    in_fp8 = [row for name in others for row in gemm_rows(lambda _: 9.0, name, dtype="fp8")]
    service = make_predictor([*products, *in_fp8])
    train(service)
    found = _ask_h100(service)
    dims = {"m": 64, "n": 4096, "k": 4096}
    assert 2.0 == pytest.approx(found.latency_us[0] / base_us("gemm", dims, "h100_sxm"), rel=0.05)
    assert "gemm on 2 other GPUs" in found.basis


def _ask_h100(service: PredictorService) -> LatencyColumns:
    return _ask(service, "h100_sxm", DType.FP16)


def _ask(service: PredictorService, device: str, dtype: DType) -> LatencyColumns:
    columns = {"m": np.array([64]), "n": np.array([4096]), "k": np.array([4096])}
    table = OperatorTable(operator="gemm", dtype=dtype, columns=columns)
    return service.predict(LatencyQuery(device=device, tables=(table,))).tables[0]
