"""A GEMM as models run it: activations times a weight stored [out, in]."""

from collections.abc import Mapping

from torch.nn import functional

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return tensors.random(dims["m"], dims["k"]), tensors.random(dims["n"], dims["k"])


KERNEL = Kernel(
    operator="gemm",
    source="torch.nn.functional.linear",
    make_inputs=_make_inputs,
    bind=lambda _: functional.linear,
)
