"""Timing on a real CUDA device: graphs, events, caches, and what is known of the device."""

import dataclasses

import pytest
import torch

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.profiler.environment import describe_environment, free_memory_bytes
from foretoken.profiler.kernel import (
    TORCH_DTYPES,
    Kernel,
    PreparedCase,
    TensorFactory,
    all_kernels,
    find_kernels,
)
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.timing.case import (
    EVENTS,
    GRAPH,
    CallTiming,
    CaptureLog,
    Rig,
    time_call,
    time_prepared,
)
from foretoken.profiler.timing.nvml import open_nvml
from foretoken.profiler.timing.self_test import run_self_test
from foretoken.profiler.timing.sentinel import open_sentinel
from foretoken.profiler.timing.stopwatch import CaptureError, IndexedCall, capture_calls

if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)
pytestmark = pytest.mark.gpu

_CLAIMED = [
    (kernel, dtype, phase)
    for operator in sorted(all_kernels())
    for kernel in all_kernels()[operator].members
    for dtype in sorted(kernel.dtypes, key=lambda dtype: dtype.name)
    for phase in Phase
    if phase is Phase.FORWARD or kernel.differentiable
]


def gemm(size: int, dtype: DType = DType.BF16, variant: str = "") -> OperatorCall:
    dims = {"m": size, "n": size, "k": size}
    return OperatorCall(
        operator="gemm", dtype=dtype, phase=Phase.FORWARD, dims=dims, variant=variant
    )


def timed(call: OperatorCall, rig: Rig) -> CallTiming:
    tensors = TensorFactory(rig.device.torch_device, TORCH_DTYPES[call.dtype], seed=0)
    return time_call(call, tensors, rig)


def prepared(call: IndexedCall) -> PreparedCase:
    return PreparedCase(call=call, input_bytes=1, num_input_sets=1, source="test")


def test_self_test_stays_below_the_data_sheet(rig: Rig) -> None:
    """And reaches a good part of it: a timer that misses work or adds overhead would not."""
    ratios = run_self_test(rig, [DType.BF16, DType.FP8, DType.INT8], seed=0).ratios()
    assert 0.5 < ratios["copy"] <= 1.05
    assert 0.3 < ratios["gemm_bf16"] <= 1.05


def test_launch_overhead_does_not_enter_short_kernels(rig: Rig) -> None:
    """Adding 1,024 numbers takes the device a few µs, however slow the host queues it."""
    x = torch.randn(1024, device=rig.device.torch_device)
    with torch.cuda.stream(rig.stream):
        summary, _, method = time_prepared(prepared(lambda _: torch.add(x, x)), ("add",), rig)
    assert method == GRAPH
    assert 0.5 < summary.latency_us_median < 8.0


def test_a_graph_takes_as_long_as_its_calls_between_events(rig: Rig) -> None:
    """Where kernels are long, launches hide behind them, so both ways must tell the same."""
    left, right = (torch.randn(4096, 4096, device=rig.device.torch_device) for _ in range(2))
    case = prepared(lambda _: torch.mm(left, right))
    by_events = dataclasses.replace(rig, captures=CaptureLog(refused={("mm",): "asked"}))
    with torch.cuda.stream(rig.stream):
        graph, _, graph_method = time_prepared(case, ("mm",), rig)
        events, _, events_method = time_prepared(case, ("mm",), by_events)
    assert (graph_method, events_method) == (GRAPH, EVENTS)
    assert graph.latency_us_median == pytest.approx(events.latency_us_median, rel=0.1)


def test_a_memory_bound_kernel_is_slower_out_of_the_cache(rig: Rig) -> None:
    """A weight of a quarter of the L2 cache, read for one token."""
    n = int(rig.device_spec.l2_cache_bytes / 4 / 2 / 4096)
    call = OperatorCall(operator="gemm", dtype=DType.BF16, dims={"m": 1, "n": n, "k": 4096})
    cold = timed(call, rig).summary.latency_us_median
    warm = timed(dataclasses.replace(call, variant="cache=warm"), rig).summary.latency_us_median
    assert cold > 1.05 * warm


def test_what_cannot_be_captured_is_timed_by_events_and_leaves_no_trace(rig: Rig) -> None:
    """A call that waits for the device breaks a capture; the next case is captured again."""
    x = torch.rand(1024, device=rig.device.torch_device)

    def waits(_: int) -> object:
        return torch.nn.functional.dropout(x, p=float(x.sum().item() > 0.0) / 2)

    kind = ("waits", "test")
    with torch.cuda.stream(rig.stream):
        _, _, method = time_prepared(prepared(waits), kind, rig)
        assert (method, kind in rig.captures.refused) == (EVENTS, True)
        _, _, method = time_prepared(prepared(lambda _: torch.dropout(x, 0.5, True)), ("d",), rig)
    assert method == GRAPH
    assert "waits/test" in rig.summary()["not_capturable"]
    # The generator draws again after the capture that failed.
    assert torch.rand(8, device=rig.device.torch_device).std() > 0.0


def test_a_graph_gives_its_memory_back(rig: Rig) -> None:
    x = torch.randn(2**24, device=rig.device.torch_device)
    with torch.cuda.stream(rig.stream):
        x * 2.0
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(rig.device.torch_device)
        captured = capture_calls(lambda _: x * 2.0, 10, rig.device.torch_device)
        captured.replay()
        torch.cuda.synchronize()
        captured.close()
        torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(rig.device.torch_device) <= before


def test_a_capture_that_fails_is_named(rig: Rig) -> None:
    x = torch.ones(8, device=rig.device.torch_device)
    with torch.cuda.stream(rig.stream), pytest.raises(CaptureError):
        capture_calls(lambda _: x.sum().item(), 2, rig.device.torch_device)


def test_a_call_that_launches_nothing_is_no_graph(rig: Rig) -> None:
    """An empty graph would be replayed in no time."""
    with torch.cuda.stream(rig.stream), pytest.raises(CaptureError, match="nothing"):
        capture_calls(lambda _: None, 2, rig.device.torch_device)


def test_a_backward_pass_is_captured(rig: Rig) -> None:
    """Its forward pass ran on the capturing stream, so autograd's steps run there, too."""
    timing = timed(dataclasses.replace(gemm(1024), phase=Phase.BACKWARD), rig)
    assert timing.method == GRAPH
    assert timing.num_kernels >= 2


@pytest.mark.parametrize("dtype", [DType.FP8, DType.INT8])
def test_eight_bits_are_faster_than_sixteen(dtype: DType, rig: Rig) -> None:
    if not find_kernels("gemm", dtype, Phase.FORWARD, rig.device.torch_device):
        pytest.skip(f"{rig.device.name} multiplies no {dtype.name} with torch")
    narrow, wide = timed(gemm(8192, dtype), rig), timed(gemm(8192), rig)
    assert narrow.flags == []
    assert narrow.summary.latency_us_median < wide.summary.latency_us_median


@pytest.mark.parametrize(
    ("kernel", "dtype", "phase"),
    _CLAIMED,
    ids=lambda value: (
        f"{value.operator}-{value.source}-{value.variant}"
        if isinstance(value, Kernel)
        else value.name
    ),
)
def test_every_kernel_is_timed_in_every_format_it_claims(
    kernel: Kernel, dtype: DType, phase: Phase, rig: Rig
) -> None:
    if not kernel.is_present(rig.device.torch_device):
        pytest.skip(f"{kernel.source} is not here")
    for dims in find_operator(kernel.operator).sweep(True):
        if not kernel.can_run(dims):
            continue
        call = OperatorCall(
            operator=kernel.operator,
            dtype=dtype,
            phase=phase,
            dims=dims,
            variant=kernel.variant,
            kernel=kernel.source,
        )
        try:
            timing = timed(call, rig)
        except InvalidRequestError:
            # Eight-bit kernels refuse odd shapes.
            continue
        except RuntimeError as err:
            # A backend of attention says so where it takes a shape or a mask only on other devices.
            if "No available kernel" not in str(err):
                raise
            continue
        assert timing.summary.latency_us_median > 0.0
        assert timing.kernel == kernel.source
        return
    pytest.skip(f"no small shape is one for {kernel.source}")


def test_names_are_those_of_device_kernels(rig: Rig) -> None:
    """Not of the operators that launched them; long enough to tell which GEMM it was."""
    name = timed(gemm(2048), rig).kernel_name
    assert not name.startswith("aten::")
    assert any(part in name.lower() for part in ("gemm", "nvjet", "cutlass", "xmma"))
    x = torch.randn(1, 8, 1024, 128, dtype=torch.bfloat16, device=rig.device.torch_device)
    assert rig.namer is not None
    attention = rig.namer.trace(
        "attention", 1, lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x)
    )
    assert any(part in attention.name.lower() for part in ("flash", "fmha", "attention", "sdpa"))


def test_sentinel_repeats_itself(rig: Rig) -> None:
    sentinel = open_sentinel(rig, seed=0)
    assert sentinel.check(rig.stopwatch.now_s()) == []
    assert set(sentinel.checks[0].drifts) == {"gemm", "copy"}


def test_nvml_reads_the_device_that_torch_uses(device: LocalDevice, rig: Rig) -> None:
    nvml = open_nvml(device.torch_device)
    if nvml is None:
        pytest.skip("NVML does not know this device, or its binding is not installed")
    reading = timed(gemm(4096), rig).reading
    assert reading.power_w is None or 10.0 < reading.power_w < 2000.0
    assert reading.clock_mhz is None or 100.0 < reading.clock_mhz < 4000.0
    assert reading.temperature_c is None or 10.0 < reading.temperature_c < 120.0
    assert reading.throttle is None or "idle" not in reading.throttle


def test_environment_names_the_gpu(device: LocalDevice) -> None:
    described = describe_environment(device)
    assert described["gpu"] == device.vendor_name
    assert described["cuda"]
    assert free_memory_bytes(device) > 0.0
