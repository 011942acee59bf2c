"""Every kernel that a CUDA device runs computes what its operator says, both ways."""

import pytest
import torch
from kernel_references import ATTENTION, DRAWN, backward_error, forward_error

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.kernel import (
    TORCH_DTYPES,
    Kernel,
    TensorFactory,
    all_kernels,
    find_kernels,
    kernel_of_call,
    prepare_case,
)

if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)
pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
OPERATORS = sorted({name for name in all_kernels() if not name.startswith(ATTENTION)} - set(DRAWN))


def _present(operator: str, phase: Phase) -> list[tuple[Kernel, DType]]:
    return [
        (kernel, dtype)
        for dtype in TORCH_DTYPES
        for kernel in find_kernels(operator, dtype, phase, CUDA)
    ]


@pytest.mark.parametrize("operator", OPERATORS)
def test_results_are_those_of_the_definition(operator: str) -> None:
    present = _present(operator, Phase.FORWARD)
    assert present
    for kernel, dtype in present:
        found = forward_error(kernel, dtype, CUDA)
        assert (kernel.source, kernel.variant, dtype, True) == (
            kernel.source,
            kernel.variant,
            dtype,
            found <= 1.0,
        )


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_are_those_of_the_definition(operator: str) -> None:
    for kernel, dtype in _present(operator, Phase.BACKWARD):
        found = backward_error(kernel, dtype, CUDA)
        assert (kernel.source, kernel.variant, dtype, True) == (
            kernel.source,
            kernel.variant,
            dtype,
            found <= 1.0,
        )


@pytest.mark.parametrize("operator", DRAWN)
def test_draws_run(operator: str) -> None:
    dims = next(iter(find_operator(operator).sweep(True)))
    for phase in Phase:
        for kernel, dtype in _present(operator, phase):
            call = OperatorCall(operator=operator, dtype=dtype, phase=phase, dims=dims)
            tensors = TensorFactory(CUDA, TORCH_DTYPES[dtype], seed=0)
            case = prepare_case(kernel, call, tensors, TimerSpec(max_input_sets=2), 1e5)
            case.call(0)
    torch.cuda.synchronize()


def test_the_likeliest_tokens_are_drawn() -> None:
    """By every library's sampler: one token has nearly all of the probability."""
    dims = {"num_seqs": 64, "vocab": 1000}
    logits = torch.zeros(64, 1000, device=CUDA)
    logits[:, 123] = 50.0
    for kernel in find_kernels("sampler", DType.FP32, Phase.FORWARD, CUDA):
        drawn = kernel.bind(dims)(logits)
        assert (kernel.source, {123}) == (kernel.source, set(drawn.tolist()))


def test_a_hopper_gpu_multiplies_in_8_bit_and_groups_rows_in_one_kernel() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    for operator, dtype, source in (
        ("gemm", DType.FP8, "torch._scaled_mm"),
        ("gemm", DType.INT8, "torch._int_mm"),
        ("grouped_gemm", DType.BF16, "torch._grouped_mm"),
        ("moe_experts", DType.BF16, "torch._grouped_mm"),
    ):
        assert source == find_kernels(operator, dtype, Phase.FORWARD, CUDA)[0].source


@pytest.mark.parametrize(
    ("dtype", "dims", "reason"),
    [
        (DType.FP8, {"m": 8, "n": 24, "k": 32}, "multiple of 16"),
        (DType.INT8, {"m": 64, "n": 32, "k": 12}, "multiple of 8"),
        (DType.INT8, {"m": 16, "n": 32, "k": 32}, "at least 17"),
    ],
)
def test_shapes_that_torch_cannot_multiply_are_refused_with_a_reason(
    dtype: DType, dims: dict[str, int], reason: str
) -> None:
    kernel = kernel_of_call(OperatorCall(operator="gemm", dtype=dtype), CUDA)
    with pytest.raises(InvalidRequestError, match=reason):
        kernel.make_inputs(dims, TensorFactory(CUDA, TORCH_DTYPES[dtype], seed=0))


def test_blocks_leave_and_reach_the_device_by_pinned_memory() -> None:
    dims = {"num_blocks": 4, "block_elements": 4096}
    tensors = TensorFactory(CUDA, torch.bfloat16, seed=0)
    for direction, places in (("h2d", ("cpu", "cuda")), ("d2h", ("cuda", "cpu"))):
        call = OperatorCall(
            operator="kv_swap", dtype=DType.BF16, variant=f"direction={direction}", dims=dims
        )
        source, target = kernel_of_call(call, CUDA).make_inputs(dims, tensors)
        assert places == (source.device.type, target.device.type)
        assert (source.is_pinned(), target.is_pinned()) == (direction == "h2d", direction == "d2h")
