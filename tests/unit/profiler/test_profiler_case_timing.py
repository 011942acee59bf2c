"""One call timed on the CPU, from its description to a row's columns."""

import dataclasses
import math

import pytest
import torch
from profiler_fakes import CPU

from foretoken.domain.errors import DeviceMemoryError, InvalidRequestError
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.kernel import TensorFactory, is_warm, kernel_of_call, prepare_case
from foretoken.profiler.local_device import find_local_device
from foretoken.profiler.timing.case import (
    THREAD,
    WALL,
    CallTiming,
    CaptureLog,
    Rig,
    open_rig,
    time_call,
)
from foretoken.profiler.timing.kernel_names import KernelNamer
from foretoken.profiler.timing.stopwatch import CpuStopwatch
from foretoken.profiler.timing.watch import Observation

DEVICE = find_local_device("cpu")
CPU_TORCH = DEVICE.torch_device
TIMER = TimerSpec(warm_up_s_min=0.0, warm_up_s_max=0.01, case_s_max=0.02, sample_us_min=20.0)


def rig() -> Rig:
    return Rig(
        device=DEVICE,
        device_spec=CPU,
        stopwatch=CpuStopwatch(),
        timer=TIMER,
        num_threads=1,
        namer=KernelNamer(DEVICE.torch_device),
    )


def tensors() -> TensorFactory:
    return TensorFactory(torch.device("cpu"), torch.float32, seed=0)


def gemm(phase: Phase = Phase.FORWARD, variant: str = "", kernel: str = "") -> OperatorCall:
    return OperatorCall(
        operator="gemm",
        dtype=DType.FP32,
        phase=phase,
        dims={"m": 16, "n": 32, "k": 32},
        variant=variant,
        kernel=kernel,
    )


def timed(call: OperatorCall) -> CallTiming:
    return time_call(call, tensors(), rig())


@pytest.mark.parametrize("phase", list(Phase))
def test_a_timing_says_what_ran_and_how_long_it_took(phase: Phase) -> None:
    timing = timed(gemm(phase))
    assert timing.kernel == "torch.nn.functional.linear"
    assert timing.kernel_name.startswith("aten::")
    assert timing.num_kernels >= 1
    assert 0.0 < timing.summary.latency_us_min <= timing.summary.latency_us_median
    assert timing.method == WALL


def test_a_case_in_the_cache_has_one_set_of_inputs() -> None:
    """A cold one has as many as exceed the cache: ten times 8 KiB here."""
    cold = prepare_case(kernel_of_call(gemm(), CPU_TORCH), gemm(), tensors(), TIMER, 80_000)
    warm_call = gemm(variant="cache=warm")
    warm = prepare_case(kernel_of_call(warm_call, CPU_TORCH), warm_call, tensors(), TIMER, 80_000)
    assert cold.num_input_sets > 10
    assert warm.num_input_sets == 1


def test_where_inputs_lie_is_not_the_kernels_affair() -> None:
    warm = gemm(variant="cache=warm;layout=nn", kernel="torch.mm")
    assert is_warm(warm)
    assert not is_warm(gemm(variant="layout=nn"))
    assert kernel_of_call(warm, CPU_TORCH).variant == "layout=nn"
    assert timed(warm).kernel == "torch.mm"


def test_a_kernel_that_is_not_here_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="no kernel called cutlass runs gemm"):
        timed(gemm(kernel="cutlass"))


def test_a_call_that_does_not_fit_is_not_tried() -> None:
    narrow = dataclasses.replace(rig(), memory_ratio_max=1e-12)
    with pytest.raises(DeviceMemoryError, match="needs about"):
        time_call(gemm(), tensors(), narrow)


def test_without_a_namer_no_kernel_is_named() -> None:
    nameless = dataclasses.replace(rig(), namer=None)
    timing = time_call(gemm(), tensors(), nameless)
    assert (timing.kernel_name, timing.num_kernels) == ("", 0)


def test_an_open_rig_times_calls_and_says_how() -> None:
    opened = open_rig(DEVICE, TIMER, num_threads=1)
    timing = time_call(gemm(), tensors(), opened)
    assert timing.summary.num_samples >= 3
    assert math.isfinite(timing.summary.latency_us_p90)
    assert (timing.method, opened.describe()) == (THREAD, {"timing": THREAD})
    assert opened.summary() == {"kernels_looked_up": "1"}


def test_several_threads_are_timed_by_the_wall() -> None:
    assert open_rig(DEVICE, TIMER, num_threads=2).method == WALL


def test_a_summary_counts_graphs_and_names_what_cannot_be_one() -> None:
    log = CaptureLog(
        num_graphs=7, num_events=2, refused={("sampler", "torch.multinomial"): "syncs"}
    )
    assert dataclasses.replace(rig(), captures=log).summary() == {
        "timed_as_graphs": "7",
        "timed_as_events": "2",
        "not_capturable": "sampler/torch.multinomial",
    }


class FakeWatch:
    """Says of one attempt after another how long it waited for a core."""

    def __init__(self, *waited_ratios: float) -> None:
        self._waited = list(waited_ratios)

    def start(self) -> None:
        pass

    def finish(self) -> Observation:
        ratio = self._waited.pop(0)
        is_disturbed = ratio > 0.25
        flags = ("busy_machine: ",) if is_disturbed else ()
        return Observation(flags=flags, waited_ratio=ratio, is_disturbed=is_disturbed)

    def clock_mhz(self) -> float | None:
        return None


@pytest.mark.parametrize(
    ("waited_ratios", "flags"),
    [((0.1,), []), ((0.5, 0.0), []), ((0.5, 0.6), ["busy_machine: "])],
)
def test_a_disturbed_case_is_timed_once_more(
    waited_ratios: tuple[float, ...], flags: list[str]
) -> None:
    watched = dataclasses.replace(rig(), watch=FakeWatch(*waited_ratios))
    assert time_call(gemm(), tensors(), watched).flags == flags
