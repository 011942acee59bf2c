"""The profiler on a real CUDA device: events, flushes and the same kernels."""

import pytest
import torch

from foretoken.domain.estimate import DType, OperatorCall, Phase
from foretoken.domain.hardware.device import find_device
from foretoken.domain.operator import find_operator
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.environment import describe_environment, free_memory_bytes
from foretoken.profiler.kernel import TensorFactory, all_kernels, prepare_case
from foretoken.profiler.local_device import LocalDevice, list_local_devices
from foretoken.profiler.self_test import check_self_test, physical_limits, run_self_test
from foretoken.profiler.timer import CudaStopwatch, time_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

TIMER = TimerSpec(case_s_max=0.2, warm_up_s_max=0.1)


@pytest.fixture(scope="module")
def device() -> LocalDevice:
    known = [device for device in list_local_devices() if device.is_cuda]
    if not known:
        pytest.skip("no device file describes this GPU")
    return known[0]


@pytest.fixture(scope="module")
def stopwatch(device: LocalDevice) -> CudaStopwatch:
    flush_bytes = int(2 * find_device(device.name).l2_cache_bytes)
    opened = CudaStopwatch(device.torch_device, flush_bytes)
    opened.open()
    return opened


@pytest.fixture(scope="module")
def tensors(device: LocalDevice) -> TensorFactory:
    return TensorFactory(device.torch_device, torch.bfloat16, seed=0)


def test_self_test_stays_below_the_data_sheet(
    device: LocalDevice, stopwatch: CudaStopwatch, tensors: TensorFactory
) -> None:
    """And reaches a good part of it: a timer that misses work or adds overhead would not."""
    result = run_self_test(device, tensors, stopwatch, TIMER)
    limits = physical_limits(find_device(device.name), DType.BF16, num_threads=1)
    check_self_test(result, limits)
    assert result.gemm_flops_per_s > 0.3 * limits.flops_per_s
    assert result.copy_bytes_per_s > 0.5 * limits.bandwidth_bytes_per_s


def test_launch_overhead_does_not_enter_short_kernels(
    device: LocalDevice, stopwatch: CudaStopwatch
) -> None:
    """Adding 1,024 numbers takes the device a few µs, however slow the host queues it."""
    x = torch.randn(1024, device=device.torch_device)
    summary = time_case(lambda _: torch.add(x, x), stopwatch, TIMER)
    assert 0.5 < summary.latency_us_median < 8.0


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("operator", sorted(all_kernels()))
def test_kernel_is_timed(
    operator: str, phase: Phase, stopwatch: CudaStopwatch, tensors: TensorFactory
) -> None:
    kernel = all_kernels()[operator]
    if phase is Phase.BACKWARD and not kernel.differentiable:
        pytest.skip(f"{operator} has no backward pass")
    dims = next(iter(find_operator(operator).sweep(True)))
    call = OperatorCall(operator=operator, dtype=DType.BF16, phase=phase, dims=dims)
    case = prepare_case(kernel, call, tensors, TIMER, cache_bytes=1e6)
    assert time_case(case.call, stopwatch, TIMER).latency_us_median > 0.0


def test_environment_names_the_gpu(device: LocalDevice) -> None:
    described = describe_environment(device)
    assert described["gpu"] == device.vendor_name
    assert described["cuda"]
    assert free_memory_bytes(device) > 0.0
