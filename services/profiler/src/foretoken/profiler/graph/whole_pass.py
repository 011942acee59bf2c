"""Whole passes of a model: the memory they may take and take, and their time."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from foretoken.domain.errors import DeviceMemoryError
from foretoken.domain.units import GIB
from foretoken.profiler.environment import free_memory_bytes
from foretoken.profiler.graph.trace import Trace, TracedCall
from foretoken.profiler.kernel import TensorFactory
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.timing.case import Rig
from foretoken.profiler.timing.timer import time_case

# What may be taken of the memory that is free: other programs want some, too.
_RATIO_MAX = 0.9
# torch has no error of its own for a CPU without memory.
_CPU_MESSAGES = ("not enough memory", "can't allocate memory", "Cannot allocate memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """Checks before memory is taken where taking too much would kill the process."""

    device: LocalDevice
    free_bytes: Callable[[LocalDevice], float] = free_memory_bytes

    def check(self, needed_bytes: float, what: str) -> None:
        """Check that there is room.

        Raises:
            DeviceMemoryError: there is not; the message says how much is.

        """
        allowed = _RATIO_MAX * self.free_bytes(self.device)
        if needed_bytes > allowed:
            raise DeviceMemoryError(
                f"out of memory: {what} takes {needed_bytes / GIB:.3g} GiB,"
                f" {allowed / GIB:.3g} GiB may be used"
            )

    def check_activations(self, needed_bytes: float, what: str) -> None:
        """Check an estimate of a pass on a CPU. A GPU says itself when it is full."""
        if not self.device.is_cuda:
            self.check(needed_bytes, what)

    def recover(self) -> None:
        """Give back what a failed case held."""
        if self.device.is_cuda:
            torch.cuda.empty_cache()


def memory_reason(err: Exception) -> str:
    """Return why there is no memory left; empty where an error says something else."""
    lines = str(err).strip().splitlines() or [repr(err)]
    if isinstance(err, DeviceMemoryError):
        return err.message
    is_full = isinstance(err, torch.OutOfMemoryError) or any(
        message in lines[0] for message in _CPU_MESSAGES
    )
    return f"out of memory: {lines[0]}" if is_full else ""


# What may return its input as another view, and mostly does.
_MOSTLY_VIEWS = ("aten.reshape", "aten.contiguous", "aten.to.", "aten.dropout", "aten.alias")


def pass_bytes(trace: Trace, *, has_backward: bool) -> float:
    """Return the bytes that a pass holds at its peak, weights and their gradients not counted.

    With a backward pass all that calls make is kept for it; without, as long as it is read.
    """
    made = {call.name: _made_bytes(call) for call in trace.calls}
    if has_backward:
        # The last result and its gradient are there together.
        last = max((made[name] for name in trace.output_names if name in made), default=0)
        return float(sum(made.values()) + last)
    return _peak_bytes(trace, made)


def _peak_bytes(trace: Trace, made: dict[str, int]) -> float:
    last_reader = {name: len(trace.calls) for name in trace.output_names}
    owner: dict[str, str] = {}
    for index, call in enumerate(trace.calls):
        sources = [owner.get(shape.name, shape.name) for shape in call.inputs]
        owner[call.name] = call.name if made[call.name] or not sources else sources[0]
        for name in sources:
            last_reader[name] = max(last_reader.get(name, index), index)
    held = peak = 0
    ends = _by_end(last_reader)
    for index, call in enumerate(trace.calls):
        held += made[call.name]
        peak = max(peak, held)
        held -= sum(made.get(name, 0) for name in ends.get(index, ()))
    return float(peak)


def _by_end(last_reader: dict[str, int]) -> dict[int, list[str]]:
    ends: dict[int, list[str]] = {}
    for name, index in last_reader.items():
        ends.setdefault(index, []).append(name)
    return ends


def _made_bytes(call: TracedCall) -> int:
    if getattr(call.target, "is_view", False):
        return 0
    sizes = [shape.num_bytes for shape in call.outputs]
    if str(call.target).startswith(_MOSTLY_VIEWS) and _keeps_size(call, sizes):
        return 0
    return sum(sizes)


def _keeps_size(call: TracedCall, sizes: Iterable[int]) -> bool:
    return bool(call.inputs) and list(sizes) == [call.inputs[0].num_bytes]


# A pass is long: a few of them say enough.
_MIN_SAMPLES, _PASS_S_MAX = 5, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WholePass:
    """Times of a model's passes in µs; `backward_us` None: there is none."""

    forward_us: float
    backward_us: float | None


def time_whole_pass(
    model: nn.Module, token_ids: torch.Tensor, rig: Rig, tensors: TensorFactory | None
) -> WholePass:
    """Time the forward pass and, with `tensors` to draw gradients from, the backward pass.

    The backward pass is that from random gradients of the logits to all parameters, without a
    loss; what it takes is the time of both passes less that of the forward pass alone.

    Raises:
        torch.OutOfMemoryError: a pass does not fit.

    """
    timer = dataclasses.replace(
        rig.timer,
        min_samples=min(rig.timer.min_samples, _MIN_SAMPLES),
        case_s_max=min(rig.timer.case_s_max, _PASS_S_MAX),
    )

    def forward(_: int) -> object:
        with torch.no_grad():
            return model(input_ids=token_ids).logits

    def both(_: int) -> object:
        with torch.enable_grad():
            logits = model(input_ids=token_ids).logits
        return torch.autograd.grad(logits, parameters, gradient, allow_unused=True)

    with torch.cuda.stream(rig.stream):
        forward_us = time_case(forward, rig.stopwatch, timer).latency_us_median
        if tensors is None:
            return WholePass(forward_us=forward_us, backward_us=None)
        with torch.no_grad():
            shape = model(input_ids=token_ids).logits.shape
        parameters = list(model.parameters())
        gradient = tensors.random(*shape)
        both_us = time_case(both, rig.stopwatch, timer).latency_us_median
    return WholePass(forward_us=forward_us, backward_us=max(0.0, both_us - forward_us))
