"""Count what a step launches, and how long the device is busy with it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from foretoken.profiler.local_device import LocalDevice

# Steps that are looked at: enough to even out, few as a profiler keeps every event.
_NUM_PROFILED = 3
# Operators that compute nothing, though their schema does not call them views.
_FREE_OPERATORS = frozenset(
    {
        "aten::_unsafe_view",
        "aten::detach",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::lift_fresh",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::record_stream",
    }
)


class OperatorRecorder(TorchDispatchMode):  # type: ignore[misc]
    """Keeps every operator that computes, with its arguments, in the order they are run."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator and keep it."""
        named = dict(kwargs or {})
        if not is_free(func):
            self.calls.append((func, args, named))
        return func(*args, **named)


def is_free(operator: Any) -> bool:
    """Tell whether an operator launches nothing: a view, or memory without content."""
    name = operator._schema.name  # noqa: SLF001 - torch has no public name for it
    return operator.is_view or name in _FREE_OPERATORS or name.startswith("profiler::")


def profile_step(run: Callable[[], object], device: LocalDevice) -> tuple[float, int]:
    """Return the µs that kernels ran on the device for a step, and their number.

    A CPU does not tell times apart from wall time: 0, and the operators that compute.
    """
    if not device.is_cuda:
        with OperatorRecorder() as recorder:
            run()
        return 0.0, len(recorder.calls)
    torch.cuda.synchronize(device.torch_device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(_NUM_PROFILED):
            run()
        torch.cuda.synchronize(device.torch_device)
    on_device = [
        event
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        # Ranges that programs name are drawn on the device, too.
        and not getattr(event, "is_user_annotation", False)
    ]
    busy_us = sum(event.time_range.elapsed_us() for event in on_device)
    return busy_us / _NUM_PROFILED, round(len(on_device) / _NUM_PROFILED)
