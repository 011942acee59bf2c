"""What a kernel module provides, how a call becomes something timed, and where it can run.

A module of `kernels/` offers `KERNEL`: which operator it runs, with what code, on what inputs.
"""

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.operators.spec.variant import format_variant, parse_variant
from foretoken.domain.plugins import scan_modules
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.timing.stopwatch import IndexedCall

# What a kernel raises that a build of torch or a device does not have.
_ABSENT = (RuntimeError, NotImplementedError, AttributeError, TypeError, ImportError)

IsPresent = Callable[[torch.device], bool]


def is_cuda(device: torch.device) -> bool:
    """Return whether the device is a GPU."""
    return str(device.type) == "cuda"


def has_capability(major: int) -> IsPresent:
    """Return whether a device is a GPU of that compute capability or a newer one."""

    def is_present(device: torch.device) -> bool:
        return is_cuda(device) and int(torch.cuda.get_device_capability(device)[0]) >= major

    return is_present


def has_library(name: str) -> IsPresent:
    """Return whether a device is a GPU and a library of GPU kernels is installed."""
    return lambda device: is_cuda(device) and _is_installed(name)


def runs(attempt: Callable[[torch.device], object]) -> IsPresent:
    """Return whether a small call works on a device; it is tried once per device."""

    @cache
    def is_present(device: torch.device) -> bool:
        try:
            attempt(device)
            if is_cuda(device):
                torch.cuda.synchronize(device)
        except _ABSENT:
            return False
        return True

    return is_present


def library(name: str) -> Any:
    """Return a module of a library that need not be installed, once a kernel wants to run it."""
    return importlib.import_module(name)


@cache
def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


Inputs = tuple[torch.Tensor, ...]

TORCH_DTYPES: Mapping[DType, torch.dtype] = {
    DType.FP32: torch.float32,
    # The same tensors, multiplied with fewer bits.
    DType.TF32: torch.float32,
    DType.FP16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.FP8: torch.float8_e4m3fn,
    DType.INT8: torch.int8,
}
# What torch's own operators compute in.
PLAIN_DTYPES = frozenset({DType.FP32, DType.FP16, DType.BF16})

# Values are drawn once and copied from: drawing millions of them per case would take longer than
# timing it.
_POOL_ELEMENTS = 2**22
# The fact of a variant that says inputs stayed in the cache; they do not in the plain case.
_CACHE_FACT, _WARM = "cache", "warm"
# Standard deviation of integers: nearly all of them fit.
_INT8_SPREAD = 32.0


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
            # As integers, normal values would nearly all be -1, 0 and 1.
            drawn = drawn * _INT8_SPREAD if self.dtype is torch.int8 else drawn
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

    `source` names the code that is called, the special case it is (a row's `variant`) `variant`.
    It runs in `dtypes`, where `is_present(device)`: its library is installed, the device can; and
    calls of the dimensions that `can_run(dims)` accepts.
    `alternatives` are other kernels of the operator; the first that can run a call is its default.
    """

    operator: str
    source: str
    make_inputs: Callable[[Mapping[str, int], TensorFactory], Inputs]
    bind: Callable[[Mapping[str, int]], Callable[..., Any]]
    differentiable: tuple[int, ...] = ()
    bind_backward: Callable[[Mapping[str, int]], Callable[..., Any]] | None = None
    variant: str = ""
    dtypes: frozenset[DType] = PLAIN_DTYPES
    is_present: Callable[[torch.device], bool] = lambda _: True
    can_run: Callable[[Mapping[str, int]], bool] = lambda _: True
    alternatives: tuple["Kernel", ...] = ()

    @property
    def members(self) -> tuple["Kernel", ...]:
        """This kernel and its alternatives."""
        return (self, *self.alternatives)


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


def find_kernels(
    operator: str, dtype: DType, phase: Phase, device: torch.device
) -> tuple[Kernel, ...]:
    """Return the kernels that run an operator here, the default of the plain case first.

    Several of one variant are alternatives to each other; the first of a variant is its default.
    """
    if operator not in all_kernels():
        return ()
    return tuple(
        kernel
        for kernel in all_kernels()[operator].members
        if dtype in kernel.dtypes
        and (phase is Phase.FORWARD or kernel.differentiable)
        and kernel.is_present(device)
    )


def is_warm(call: OperatorCall) -> bool:
    """Return whether a call requests inputs that stayed in the cache (`cache=warm`)."""
    return parse_variant(call.variant).get(_CACHE_FACT) == _WARM


def kernel_of_call(call: OperatorCall, device: torch.device) -> Kernel:
    """Return the kernel that a call names, or the default of its variant that can run it.

    Where the inputs lie is not the kernel's affair: `cache=warm` is left out of the variant.

    Raises:
        InvalidRequestError: none runs it here.

    """
    facts = parse_variant(call.variant)
    if facts.get(_CACHE_FACT) == _WARM:
        del facts[_CACHE_FACT]
    variant = format_variant(facts) or ""
    for kernel in find_kernels(call.operator, call.dtype, call.phase, device):
        is_meant = kernel.variant == variant and call.kernel in ("", kernel.source)
        if is_meant and kernel.can_run(call.dims):
            return kernel
    what = f"{call.dtype.name.lower()} {call.phase.name.lower()} {call.variant}".strip()
    named = f" called {call.kernel}" if call.kernel else ""
    raise InvalidRequestError(
        f"no kernel{named} runs {call.operator} ({what}) of these dimensions on {device.type}"
    )


def prepare_case(
    kernel: Kernel, call: OperatorCall, tensors: TensorFactory, spec: TimerSpec, cache_bytes: float
) -> PreparedCase:
    """Build rotating inputs for a call, and for a backward call the graphs to run back through.

    One set, used again and again, where the call requests a warm cache. Forward calls belong under
    `torch.no_grad`: entering it in each call would take as long as a short kernel.

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
    num_sets = 1 if is_warm(call) else _num_input_sets(input_bytes, spec, cache_bytes)
    sets = [first, *(kernel.make_inputs(call.dims, tensors) for _ in range(num_sets - 1))]
    if is_backward:
        steps = [_backward_step(kernel, run, inputs, tensors) for inputs in sets]
    else:
        steps = [functools.partial(run, *inputs) for inputs in sets]
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
