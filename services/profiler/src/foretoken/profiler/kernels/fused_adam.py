"""One fused Adam update of a list of equal tensors, all in one number format."""

from collections.abc import Callable, Mapping

import torch
from torch.optim.adam import adam

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    size = dims["num_params"]
    return (
        tensors.random(size),
        tensors.random(size),
        tensors.random(size),
        tensors.random(size).abs_(),
        torch.ones((), device=tensors.device),
    )


def _bind(dims: Mapping[str, int]) -> Callable[..., None]:
    num_tensors = dims["num_tensors"]

    def run(*flat: torch.Tensor) -> None:
        *state, step = flat
        parameters, gradients, first_moments, second_moments = (
            list(tensor.tensor_split(num_tensors)) for tensor in state
        )
        adam(
            parameters,
            gradients,
            first_moments,
            second_moments,
            [],
            [step] * num_tensors,
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=1e-3,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )

    return run


KERNEL = Kernel(
    operator="fused_adam",
    source="torch.optim.adam.adam(fused)",
    make_inputs=_make_inputs,
    bind=_bind,
)
