"""Norm of gradients in fp32, weighted as that of a group of parameters.

Of one flat tensor, or of a list of them as `torch.nn.utils.clip_grad_norm_` takes it.
"""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory

# Tensors in the list: as many as a few layers have.
_NUM_TENSORS = 64


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return tensors.random(dims["num_params"], dtype=torch.float32), tensors.random(256)


def _run(gradients: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(gradients) * weight[0]


def _run_list(gradients: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    parts = list(gradients.tensor_split(min(_NUM_TENSORS, gradients.numel())))
    norms = torch._foreach_norm(parts)  # noqa: SLF001
    return torch.linalg.vector_norm(torch.stack(norms)) * weight[0]


KERNEL = Kernel(
    operator="gradient_norm",
    source="torch.linalg.vector_norm",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    alternatives=(
        Kernel(
            operator="gradient_norm",
            source="torch._foreach_norm",
            make_inputs=_make_inputs,
            bind=lambda _: _run_list,
        ),
    ),
)
