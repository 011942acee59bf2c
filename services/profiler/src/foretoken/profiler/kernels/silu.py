"""Activation of gated MLPs, without the product."""

from collections.abc import Mapping

from torch.nn import functional

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (tensors.random(dims["num_tokens"], dims["intermediate"]),)


KERNEL = Kernel(
    operator="silu",
    source="torch.nn.functional.silu",
    make_inputs=_make_inputs,
    bind=lambda _: functional.silu,
    differentiable=(0,),
)
