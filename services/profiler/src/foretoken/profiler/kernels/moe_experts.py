"""Expert MLPs one after the other; the rows are spread evenly over the active experts."""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from foretoken.domain.errors import InvalidRequestError
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    active, hidden, width = dims["num_active_experts"], dims["hidden"], dims["intermediate"]
    return (
        tensors.random(dims["num_tokens"] * dims["top_k"], hidden),
        tensors.random(active, hidden, 2 * width),
        tensors.random(active, width, hidden),
    )


def _bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    num_rows, num_active = dims["num_tokens"] * dims["top_k"], dims["num_active_experts"]
    if num_rows < num_active:
        raise InvalidRequestError(f"{num_rows} rows cannot reach {num_active} experts")

    def run(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        parts = []
        for expert, rows in enumerate(x.tensor_split(num_active)):
            gate, value = (rows @ up[expert]).chunk(2, dim=-1)
            parts.append((functional.silu(gate) * value) @ down[expert])
        return torch.cat(parts)

    return run


KERNEL = Kernel(
    operator="moe_experts",
    source="torch.mm per expert",
    make_inputs=_make_inputs,
    bind=_bind,
)
