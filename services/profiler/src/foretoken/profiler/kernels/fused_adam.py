"""One Adam update of a list of equal tensors, all in one number format.

Fused, as one kernel does it; `foreach`, kernel by kernel over the list; or tensor by tensor.
"""

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
        # Each tensor counts its own steps.
        torch.ones(dims["num_tensors"], device=tensors.device),
    )


def _bind(
    dims: Mapping[str, int], *, fused: bool = False, foreach: bool = False
) -> Callable[..., None]:
    num_tensors = dims["num_tensors"]

    def run(*flat: torch.Tensor) -> None:
        *state, steps = flat
        parameters, gradients, first_moments, second_moments = (
            list(tensor.tensor_split(num_tensors)) for tensor in state
        )
        adam(
            parameters,
            gradients,
            first_moments,
            second_moments,
            [],
            list(steps.unbind()),
            fused=fused,
            foreach=foreach,
            capturable=steps.is_cuda,
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
    bind=lambda dims: _bind(dims, fused=True),
    alternatives=(
        Kernel(
            operator="fused_adam",
            source="torch.optim.adam.adam(foreach)",
            make_inputs=_make_inputs,
            bind=lambda dims: _bind(dims, foreach=True),
        ),
        Kernel(
            operator="fused_adam",
            source="torch.optim.adam.adam(for loop)",
            make_inputs=_make_inputs,
            bind=_bind,
        ),
    ),
)
