"""The products that only some devices have, their limits, and which one is the default."""

import pytest
import torch
from kernel_references import reference_of

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.profiler.kernel import (
    TORCH_DTYPES,
    Kernel,
    TensorFactory,
    all_kernels,
    find_kernels,
    kernel_of_call,
)

CPU = torch.device("cpu")
GPU_ALONE = (
    ("gemm", DType.TF32, "", ""),
    ("gemm", DType.BF16, "accumulate=fp32", ""),
    ("kv_swap", DType.BF16, "direction=h2d", ""),
    ("kv_swap", DType.BF16, "direction=d2h", ""),
    ("rms_norm", DType.BF16, "", "flashinfer.norm.rmsnorm"),
    ("add_rms_norm", DType.BF16, "", "flashinfer.norm.fused_add_rmsnorm"),
    ("silu_mul", DType.BF16, "", "flashinfer.activation.silu_and_mul"),
    ("rope", DType.BF16, "", "flashinfer.rope.apply_rope_with_cos_sin_cache_inplace"),
    ("sampler", DType.BF16, "sampling=top_k", "flashinfer.sampling.top_k_sampling_from_probs"),
)


@pytest.mark.parametrize(("operator", "dtype", "variant", "source"), GPU_ALONE)
def test_kernels_of_gpus_are_absent_on_the_cpu_and_the_reason_is_said(
    operator: str, dtype: DType, variant: str, source: str
) -> None:
    members = all_kernels()[operator].members
    assert any(
        dtype in member.dtypes and member.variant == variant and source in ("", member.source)
        for member in members
    )
    call = OperatorCall(operator=operator, dtype=dtype, variant=variant, kernel=source)
    with pytest.raises(InvalidRequestError, match=f"runs {operator} .* on cpu") as caught:
        kernel_of_call(call, CPU)
    assert dtype.name.lower() in str(caught.value)


def test_formats_of_8_bit_have_no_backward_pass_of_their_own() -> None:
    """Their gradients are forward calls of other shapes (`OperatorSpec.backward_calls`)."""
    for dtype in (DType.FP8, DType.INT8):
        assert () == find_kernels("gemm", dtype, Phase.BACKWARD, CPU)
    assert find_kernels("gemm", DType.BF16, Phase.BACKWARD, CPU)


@pytest.mark.parametrize("operator", ["grouped_gemm", "grouped_gemm_wgrad"])
def test_widths_that_grouped_products_cannot_read_are_multiplied_one_by_one(operator: str) -> None:
    """Rows of 12 values of two bytes start at no multiple of 16 bytes."""
    dims = {"num_groups": 2, "m": 8, "n": 12, "k": 16}
    sources = [
        kernel_of_call(
            OperatorCall(operator=operator, dtype=DType.BF16, dims={**dims, "n": width}), CPU
        ).source
        for width in (12, 16)
    ]
    assert [True, False] == ["per expert" in source for source in sources]
    named = OperatorCall(operator=operator, dtype=DType.BF16, dims=dims, kernel="torch._grouped_mm")
    with pytest.raises(InvalidRequestError, match=r"_grouped_mm runs .* of these dimensions"):
        kernel_of_call(named, CPU)


def test_settings_of_products_are_put_back() -> None:
    """A product in TF32 must not make later ones less exact."""
    (tf32,) = (k for k in all_kernels()["gemm"].members if DType.TF32 in k.dtypes)
    dims = {"m": 2, "n": 3, "k": 4}
    inputs = tf32.make_inputs(dims, TensorFactory(CPU, torch.float32, seed=1))
    before = torch.backends.cuda.matmul.allow_tf32
    expected = torch.nn.functional.linear(*inputs)
    torch.testing.assert_close(expected, tf32.bind(dims)(*inputs))
    assert before == torch.backends.cuda.matmul.allow_tf32


def test_experts_multiply_in_one_kernel_by_default_where_torch_has_it() -> None:
    for operator in ("grouped_gemm", "grouped_gemm_wgrad", "moe_experts", "moe_local_experts"):
        narrow = find_kernels(operator, DType.BF16, Phase.FORWARD, CPU)
        wide = find_kernels(operator, DType.FP32, Phase.FORWARD, CPU)
        assert "torch._grouped_mm" == narrow[0].source
        assert "torch._grouped_mm" not in {kernel.source for kernel in wide}


@pytest.mark.parametrize("operator", ["moe_experts", "moe_local_experts"])
@pytest.mark.parametrize("routing", ["balanced", "power_law_1.01", "power_law_1.2"])
def test_experts_run_under_every_routing_that_serving_asks_for(operator: str, routing: str) -> None:
    dims = next(iter(find_operator(operator).sweep(True)))
    for dtype in (DType.FP32, DType.BF16):
        call = OperatorCall(operator=operator, dtype=dtype, dims=dims, variant=f"routing={routing}")
        assert operator == kernel_of_call(call, CPU).operator


def _kernels_in_fp8() -> list[Kernel]:
    return [
        member
        for operator in ("grouped_gemm", "moe_experts", "moe_local_experts")
        for member in all_kernels()[operator].members
        if DType.FP8 in member.dtypes
    ]


@pytest.mark.parametrize("kernel", _kernels_in_fp8(), ids=lambda k: f"{k.operator} {k.variant}")
def test_grouped_products_in_8_bit_fit_together(kernel: Kernel) -> None:
    """No CPU runs them; torch's own checks of formats, layouts and scales do without data."""
    dims = reference_of(kernel).dims
    inputs = kernel.make_inputs(dims, TensorFactory(CPU, TORCH_DTYPES[DType.FP8], seed=1))
    result = kernel.bind(dims)(*(tensor.to("meta") for tensor in inputs))
    width = dims["n"] if kernel.operator == "grouped_gemm" else dims["hidden"]
    assert (torch.bfloat16, (len(inputs[0]), width)) == (result.dtype, tuple(result.shape))
