"""One rank's expert MLPs as batched products; the pairs are spread evenly over the active experts.

Even shares differ by one row at most, so two batches hold them all without padding. The weights
of idle experts are left out: they are not read, and would count in the rotation of inputs.
"""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from foretoken.domain.errors import InvalidRequestError
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    active, hidden, width = dims["num_active_experts"], dims["hidden"], dims["intermediate"]
    return (
        tensors.random(dims["num_local_pairs"], hidden),
        tensors.random(active, hidden, 2 * width),
        tensors.random(active, width, hidden),
    )


def _bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    num_pairs, num_active = dims["num_local_pairs"], dims["num_active_experts"]
    if not num_active <= min(num_pairs, dims["num_local_experts"]):
        raise InvalidRequestError(
            f"{num_pairs} pairs cannot reach {num_active} of {dims['num_local_experts']} experts"
        )
    # As `tensor_split` has it, the first experts take a row more.
    num_rows, num_larger = divmod(num_pairs, num_active)
    cut = num_larger * (num_rows + 1)

    def run(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        if not num_larger:
            return _run_experts(x, up, down)
        return torch.cat(
            (
                _run_experts(x[:cut], up[:num_larger], down[:num_larger]),
                _run_experts(x[cut:], up[num_larger:], down[num_larger:]),
            )
        )

    return run


def _run_experts(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return the MLPs' output for rows that lie expert by expert, as many for each."""
    gate, value = torch.bmm(x.unflatten(0, (len(up), -1)), up).chunk(2, dim=-1)
    return torch.bmm(functional.silu(gate) * value, down).flatten(0, 1)


KERNEL = Kernel(
    operator="moe_local_experts",
    source="torch.bmm over the experts",
    make_inputs=_make_inputs,
    bind=_bind,
)
