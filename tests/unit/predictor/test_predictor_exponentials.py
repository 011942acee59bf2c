"""What exponentials of attention take joins what one device shows of another."""

import numpy as np
import pytest

from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.features import Design, build_design
from foretoken.predictor.roofline import Target
from foretoken.predictor.transfer.exponentials import hold_to_exponentials

_NUM_HEADS = 32


def _prefill(device: str, dtype: DType, head_dim: int = 64) -> tuple[Design, Design]:
    """Return attention of a long prompt as the roofline counts it, and with its exponentials."""
    spec, target = (
        find_operator("attention_prefill"),
        Target(device=find_device(device), dtype=dtype),
    )
    shape = {"num_heads": _NUM_HEADS, "num_kv_heads": 8, "head_dim": head_dim}
    dims = {**prefill_dims(1, 8192, 0), **shape}
    columns = {name: np.array([dims[name]]) for name in spec.dim_names}
    design = build_design(spec, columns, target)
    return design, hold_to_exponentials(spec, target.device, design)


def test_heads_of_64_wait_for_exponentials_on_a_b200_and_those_of_128_not_on_an_h100() -> None:
    plain, held = _prefill("b200", DType.BF16)
    device = find_device("b200")
    exponentials = _NUM_HEADS * 8192 * 8193 / 2
    least_us = 1e6 * exponentials / (16 * device.num_sms * device.clock_hz)
    assert least_us == pytest.approx(held.roofline_us[0])
    assert held.base_us[0] == pytest.approx(plain.base_us[0] + least_us - plain.roofline_us[0])
    assert [held.base_us[0], held.roofline_us[0]] == pytest.approx(held.work[0, [0, 2]])
    plain, held = _prefill("h100_sxm", DType.BF16, head_dim=128)
    assert plain.base_us.tolist() == held.base_us.tolist()


def test_a_b300_has_twice_as_many_a_clock() -> None:
    rates = [
        _prefill(name, DType.FP8)[1].roofline_us[0]
        * find_device(name).num_sms
        * find_device(name).clock_hz
        for name in ("b200", "b300")
    ]
    assert 2.0 == pytest.approx(rates[0] / rates[1])


@pytest.mark.parametrize("operator", ["gemm", "attention_decode"])
def test_what_counts_no_pairs_of_a_query_and_a_key_stays_as_it_is(operator: str) -> None:
    spec, target = find_operator(operator), Target(device=find_device("b200"), dtype=DType.BF16)
    columns = {dim.name: np.array([max(dim.minimum, 64)]) for dim in spec.dims}
    design = build_design(spec, columns, target)
    assert design is hold_to_exponentials(spec, target.device, design)


def test_of_a_chip_whose_units_nobody_tells_nothing_is_held() -> None:
    plain, held = _prefill("mi300x", DType.BF16)
    assert plain is held
