"""Names of the kernels that ran, and how often they are looked up."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.profiler.timing.kernel_names import (
    LONGEST_NAME,
    NOT_TRACED,
    KernelNamer,
    KernelTrace,
    shorten,
    summarize_kernels,
    trace_kernels,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::mm", "aten::mm"),
        ("nvjet_hsh_128x256_64x4_1x2_h_coopA_NTN", "nvjet_hsh_128x256_64x4_1x2_h_coopA_NTN"),
        (
            (
                "void at::native::vectorized_elementwise_kernel<4, "
                "at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
                "(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
            ),
            "vectorized_elementwise_kernel<4,CUDAFunctor_add<float>,std::array<char*,3ul>>",
        ),
        (
            "void at::native::(anonymous namespace)::softmax_warp<float, (int)9>(float*, int)",
            "softmax_warp<float,(int)9>",
        ),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        (
            (
                "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >"
                "(pytorch_flash::Flash_fwd_params)"
            ),
            "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128,128,64,4>>",
        ),
    ],
)
def test_names_keep_what_tells_kernels_apart(name: str, expected: str) -> None:
    assert shorten(name) == expected


@given(st.text(min_size=1, max_size=400), st.text(min_size=1, max_size=400))
def test_names_are_short_and_stay_different(one: str, other: str) -> None:
    """Two long names that begin alike differ by their ends."""
    stem = "kernel<" + "x" * LONGEST_NAME
    names = {shorten(f"{stem}{one.encode().hex()}"), shorten(f"{stem}{other.encode().hex()}")}
    assert all(len(name) <= LONGEST_NAME for name in names)
    assert len(names) == len({one, other})


def test_the_kernel_with_the_most_time_names_the_call() -> None:
    """Launches of one kernel count together; one that takes next to nothing is not counted."""
    trace = summarize_kernels({"gemm": [40.0], "split_k": [30.0, 30.0], "fill": [0.1]})
    assert trace == KernelTrace(name="split_k", num_kernels=3)
    assert summarize_kernels({}) == NOT_TRACED


def test_a_product_is_named_on_a_cpu() -> None:
    x = torch.randn(256, 256)
    assert trace_kernels(lambda: torch.mm(x, x), CPU).name == "aten::mm"


class _SlowAround(torch.autograd.Function):
    """An autograd node that takes longer than the operator it calls, as a preempted one does."""

    @staticmethod
    def forward(_context: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_context: object, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return gradient * 2


def test_what_autograd_does_around_operators_is_none() -> None:
    x = torch.ones(4, requires_grad=True)
    y = _SlowAround.apply(x)
    trace = trace_kernels(lambda: torch.autograd.grad(y, x, y, retain_graph=True), CPU)
    assert trace.name.startswith("aten::")


def test_a_call_that_waited_once_is_named_by_what_took_longest_in_the_others() -> None:
    """Copying a few numbers waits in the first of two calls, as on a busy machine."""
    times_us = {"aten::exp": [210.0, 200.0], "aten::copy_": [500_000.0, 1.0]}
    assert summarize_kernels(times_us, 2) == KernelTrace(name="aten::exp", num_kernels=1)
    # Times that do not divide among the calls count as one call's.
    assert summarize_kernels({**times_us, "aten::copy_": [500_000.0]}, 2).name == "aten::copy_"


def test_a_call_on_a_cpu_is_repeated_while_that_takes_little() -> None:
    """Up to five times in 50 ms, and twice however long it takes."""
    ticks = Ticks()
    trace_kernels(ticks.work, CPU, lambda: ticks.now_s)
    assert ticks.now_s == 2.0
    x = torch.ones(1)
    calls: list[torch.Tensor] = []
    trace_kernels(lambda: calls.append(x.neg()), CPU, lambda: 0.0)
    assert len(calls) == 5


def test_a_call_that_fails_says_so() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        trace_kernels(lambda: torch.mm(x, x), CPU)


class Ticks:
    """Time passes when the test says so, and a second at each call that is traced.

    A call runs one operator that calls no other: no load makes another one take longest.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._x = torch.ones(1)

    def work(self) -> None:
        self.now_s += 1.0
        self._x.neg_()

    def rest(self) -> None:
        self._x.zero_()


def test_lookups_keep_to_their_share_of_the_time() -> None:
    """Each is two calls of a second; 5 % of two minutes is six, and the first two of a kind."""
    ticks = Ticks()
    namer = KernelNamer(CPU, share_max=0.05, now_s=lambda: ticks.now_s)
    namer.open()
    first = namer.trace("gemm", 1, ticks.work)
    assert (first.name, first.num_kernels > 0) == ("aten::neg_", True)
    assert namer.trace("gemm", 2, ticks.work).num_kernels > 0
    # From here on what both are called is the name of all.
    assert namer.trace("gemm", 3, ticks.work) == KernelTrace(name="aten::neg_")
    assert namer.num_traced == 2
    ticks.now_s += 120.0
    assert namer.trace("gemm", 4, ticks.work).num_kernels > 0
    assert namer.num_traced == 3


def test_kinds_whose_calls_run_different_kernels_pass_no_name_on() -> None:
    ticks = Ticks()
    namer = KernelNamer(CPU, share_max=0.0, now_s=lambda: ticks.now_s)
    namer.open()
    names = {namer.trace("gemm", 1, ticks.work).name, namer.trace("gemm", 2, ticks.rest).name}
    assert names == {"aten::neg_", "aten::zero_"}
    assert namer.trace("gemm", 3, ticks.work) == NOT_TRACED


def test_a_call_is_looked_up_once() -> None:
    ticks = Ticks()
    namer = KernelNamer(CPU, share_max=1.0, now_s=lambda: ticks.now_s)
    first = namer.trace("gemm", 1, ticks.work)
    assert namer.trace("gemm", 1, ticks.work) is first
    assert namer.num_traced == 1
