"""Token embedding look-up; the backward pass writes a dense gradient of the table."""

from collections.abc import Mapping

from torch.nn import functional

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    tokens = tensors.integers(dims["vocab"], dims["num_tokens"])
    return tokens, tensors.random(dims["vocab"], dims["hidden"])


KERNEL = Kernel(
    operator="embedding",
    source="torch.nn.functional.embedding",
    make_inputs=_make_inputs,
    bind=lambda _: functional.embedding,
    differentiable=(1,),
)
