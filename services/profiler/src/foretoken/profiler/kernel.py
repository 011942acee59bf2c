"""What a kernel module provides, and how a call becomes something that can be timed.

A module of `kernels/` offers `KERNEL`: which operator it runs, with what code, on what inputs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.estimate import DType, OperatorCall, Phase
from foretoken.domain.plugins import scan_modules
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.timer import IndexedCall

Inputs = tuple[torch.Tensor, ...]

TORCH_DTYPES: Mapping[DType, torch.dtype] = {
    DType.FP32: torch.float32,
    DType.FP16: torch.float16,
    DType.BF16: torch.bfloat16,
}

# Values are drawn once and copied from: drawing millions of them per case would take longer than
# timing it.
_POOL_ELEMENTS = 2**22


class TensorFactory:
    """Makes random tensors of one dtype on one device; never zeros, which run faster on GPUs."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        """Draw every value from `seed`."""
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._offsets = torch.Generator().manual_seed(seed)
        self._pool = torch.empty(0)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return standard normal values."""
        if not self._pool.numel():
            drawn = torch.randn(_POOL_ELEMENTS, generator=self._generator, device=self.device)
            self._pool = drawn.to(self.dtype)
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        for piece in tensor.view(-1).split(_POOL_ELEMENTS // 2):
            spare = _POOL_ELEMENTS - piece.numel()
            start = int(torch.randint(spare, (1,), generator=self._offsets))
            piece.copy_(self._pool[start : start + piece.numel()])
        return tensor

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Return int64 values from 0 to below `high`."""
        return torch.randint(high, shape, generator=self._generator, device=self.device)

    def distinct_integers(self, high: int, size: int) -> torch.Tensor:
        """Return `size` different int64 values below `high`."""
        return torch.randperm(high, generator=self._generator, device=self.device)[:size]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """How one operator runs with torch.

    `make_inputs(dims, tensors)` builds one set of inputs; `run(*inputs)` computes, and may close
    over nothing but what `bind(dims)` gave it. `differentiable` are the positions of the inputs
    that get gradients in the backward pass; empty where the operator has none. `bind_backward`
    gives the forward function to run back through, where it is not the one to time forward.
    `source` names the code that runs.
    """

    operator: str
    source: str
    make_inputs: Callable[[Mapping[str, int], TensorFactory], Inputs]
    bind: Callable[[Mapping[str, int]], Callable[..., Any]]
    differentiable: tuple[int, ...] = ()
    bind_backward: Callable[[Mapping[str, int]], Callable[..., Any]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedCase:
    """A call ready to be timed: `call(i)` runs it with input set `i % num_input_sets`."""

    call: IndexedCall
    input_bytes: int
    num_input_sets: int
    source: str


@cache
def all_kernels() -> dict[str, Kernel]:
    """Return the kernels by operator: one file each in `kernels/`."""
    found = scan_modules("foretoken.profiler.kernels", "KERNEL").values()
    return {kernel.operator: kernel for kernel in found}


def prepare_case(
    kernel: Kernel, call: OperatorCall, tensors: TensorFactory, spec: TimerSpec, cache_bytes: float
) -> PreparedCase:
    """Build rotating inputs for a call, and for a backward call the graphs to run back through.

    Raises:
        InvalidRequestError: the kernel has no backward pass.

    """
    is_backward = call.phase is Phase.BACKWARD
    if is_backward and not kernel.differentiable:
        raise InvalidRequestError(f"{kernel.source} has no backward pass")
    bind = kernel.bind_backward if is_backward and kernel.bind_backward else kernel.bind
    run = bind(call.dims)
    first = kernel.make_inputs(call.dims, tensors)
    input_bytes = sum(tensor.nbytes for tensor in first)
    num_sets = _num_input_sets(input_bytes, spec, cache_bytes)
    sets = [first, *(kernel.make_inputs(call.dims, tensors) for _ in range(num_sets - 1))]
    if is_backward:
        steps = [_backward_step(kernel, run, inputs, tensors) for inputs in sets]
    else:
        steps = [_forward_step(run, inputs) for inputs in sets]
    return PreparedCase(
        call=lambda index: steps[index % num_sets](),
        input_bytes=input_bytes,
        num_input_sets=num_sets,
        source=kernel.source,
    )


def _num_input_sets(input_bytes: int, spec: TimerSpec, cache_bytes: float) -> int:
    rotated_bytes = spec.rotation_cache_ratio * cache_bytes
    # One set that is twice as large evicts itself from one call to the next.
    if input_bytes >= 2 * rotated_bytes:
        return 1
    return min(math.ceil(rotated_bytes / max(input_bytes, 1)) + 1, spec.max_input_sets)


def _forward_step(run: Callable[..., Any], inputs: Inputs) -> Callable[[], object]:
    def step() -> object:
        with torch.no_grad():
            return run(*inputs)

    return step


def _backward_step(
    kernel: Kernel, run: Callable[..., Any], inputs: Inputs, tensors: TensorFactory
) -> Callable[[], object]:
    leaves = [inputs[position].requires_grad_() for position in kernel.differentiable]
    with torch.enable_grad():
        result = run(*inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    gradients = [tensors.random(*output.shape, dtype=output.dtype) for output in outputs]

    def step() -> object:
        return torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)

    return step
