"""The experts of every token: softmax over the router's logits in fp32, the largest, normalised."""

from collections.abc import Callable, Mapping

import torch

from foretoken.domain.errors import InvalidRequestError
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (tensors.random(dims["num_tokens"], dims["num_experts"]),)


def _bind(dims: Mapping[str, int]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    top_k = dims["top_k"]
    if top_k > dims["num_experts"]:
        raise InvalidRequestError(f"a token cannot go to {top_k} of {dims['num_experts']} experts")

    def run(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), experts

    return run


def _bind_backward(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    run = _bind(dims)
    # The choice itself has no gradient.
    return lambda logits: run(logits)[0]


KERNEL = Kernel(
    operator="moe_topk",
    source="torch.softmax + torch.topk",
    make_inputs=_make_inputs,
    bind=_bind,
    bind_backward=_bind_backward,
    differentiable=(0,),
)
