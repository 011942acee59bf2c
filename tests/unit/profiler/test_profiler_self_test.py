"""What the self-test and the check of each row refuse or flag."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiler_fakes import CPU

from foretoken.domain.errors import ImplausibleTimingError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.local_device import find_local_device
from foretoken.profiler.timing.case import Rig
from foretoken.profiler.timing.plausibility import (
    PhysicalLimits,
    implausible_flags,
    physical_limits,
)
from foretoken.profiler.timing.self_test import SelfTest, check_self_test, run_self_test
from foretoken.profiler.timing.stopwatch import CpuStopwatch

LIMITS = PhysicalLimits(flops_per_s=100e12, bandwidth_bytes_per_s=2e12)
GEMM = OperatorCall(operator="gemm", dtype=DType.FP32, dims={"m": 1024, "n": 1024, "k": 1024})
GOOD = SelfTest(
    copy_bytes_per_s=1.8e12,
    gemm_flops_per_s={DType.BF16: 70e12, DType.FP8: 90e12},
    limits={DType.BF16: LIMITS, DType.FP8: LIMITS},
    is_data_sheet=True,
)


def test_rates_below_the_data_sheet_pass() -> None:
    check_self_test(GOOD)
    described = GOOD.describe()
    assert described["self_test_dtype"] == "bf16"
    assert described["self_test_gemm_flops_per_s"] == "7e+13"
    assert described["self_test_gemm_flops_per_s_fp8"] == "9e+13"
    assert described["self_test_data_sheet_ratios"] == "copy=0.90 gemm_bf16=0.70 gemm_fp8=0.90"
    assert "self_test_warning" not in described


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (dataclasses.replace(GOOD, copy_bytes_per_s=2.2e12), "copy reached 1.10 times"),
        (
            dataclasses.replace(GOOD, gemm_flops_per_s={DType.BF16: 120e12}),
            "gemm_bf16 reached 1.20 times",
        ),
        (dataclasses.replace(GOOD, copy_bytes_per_s=0.0), "copy reached 0.00 times"),
    ],
)
def test_what_physics_forbids_is_refused(broken: SelfTest, what: str) -> None:
    with pytest.raises(ImplausibleTimingError, match=what):
        check_self_test(broken)


def test_a_very_slow_device_is_warned_about_and_used() -> None:
    slow = dataclasses.replace(GOOD, gemm_flops_per_s={DType.BF16: 20e12, DType.FP8: 90e12})
    check_self_test(slow)
    assert slow.describe()["self_test_warning"].startswith("gemm_bf16: below 30%")
    assert "self_test_warning" not in dataclasses.replace(slow, is_data_sheet=False).describe()


def test_formats_that_do_not_run_here_say_why() -> None:
    untested = dataclasses.replace(GOOD, untested={DType.INT8: "no kernel runs gemm"})
    assert untested.describe()["self_test_not_run_int8"] == "no kernel runs gemm"


def test_a_cpu_is_tested_in_every_format_it_has() -> None:
    rig = Rig(
        device=find_local_device("cpu"),
        device_spec=CPU,
        stopwatch=CpuStopwatch(),
        timer=TimerSpec(warm_up_s_min=0.0, warm_up_s_max=0.01, case_s_max=0.01),
        num_threads=1,
    )
    result = run_self_test(rig, [DType.FP32, DType.BF16, DType.FP4], seed=0)
    assert set(result.gemm_flops_per_s) == {DType.FP32, DType.BF16}
    assert set(result.untested) == {DType.FP4}
    assert float(result.describe()["self_test_copy_bytes_per_s"]) > 1e8


def test_latency_above_the_peak_is_doubted() -> None:
    limits = physical_limits(CPU, DType.FP32, num_threads=1)
    assert implausible_flags(GEMM, 1e6, limits) == []
    flag, *_ = implausible_flags(GEMM, 1.0, limits)
    assert flag.startswith("above_peak: ")


def test_more_bytes_than_memory_moves_are_doubted() -> None:
    """2 MiB read and written in 1 µs; memory of this device moves 2 MB in that time."""
    copy = OperatorCall(operator="buffer_copy", dtype=DType.FP32, dims={"num_params": 2**19})
    (flag,) = implausible_flags(copy, 1.0, LIMITS)
    assert flag.startswith("above_bandwidth: ")
    assert implausible_flags(copy, 3.0, LIMITS) == []


@given(st.floats(min_value=2.0**21, max_value=1e12))
def test_what_the_cache_may_hold_is_not_doubted(cache_bytes: float) -> None:
    """Inputs of less than twice the cache may in part have stayed there."""
    copy = OperatorCall(operator="buffer_copy", dtype=DType.FP32, dims={"num_params": 2**19})
    assert implausible_flags(copy, 1.0, LIMITS, cache_bytes) == []


def test_collectives_are_judged_elsewhere() -> None:
    call = OperatorCall(
        operator="all_reduce",
        dtype=DType.FP32,
        phase=Phase.FORWARD,
        dims={"message_bytes": 2**30, "devices_per_node": 2, "num_nodes": 1},
    )
    assert implausible_flags(call, 1e-3, LIMITS) == []


@pytest.mark.parametrize("dtype", [DType.FP32, DType.TF32, DType.BF16, DType.FP8, DType.INT8])
def test_every_format_that_is_timed_has_limits(dtype: DType) -> None:
    for device in (CPU, find_device("h200_sxm")):
        assert physical_limits(device, dtype, num_threads=2).flops_per_s > 0.0
