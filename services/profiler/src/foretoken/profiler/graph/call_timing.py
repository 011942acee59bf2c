"""Time one call of a traced graph alone, forward and backward, on random inputs."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from foretoken.domain.measurements.estimate import Phase
from foretoken.profiler.graph.trace import TensorShape, TracedCall
from foretoken.profiler.kernel import PreparedCase, TensorFactory
from foretoken.profiler.timing.case import Rig, time_prepared
from foretoken.profiler.timing.timer import TimingSummary, summarize
from foretoken.profiler.timing.watch import Observation

# Each of many calls is known well enough after this long, and settled after this long.
_CASE_S_MAX, _WARM_UP_S_MAX = 0.25, 0.05
# What allocates and computes nothing, and what only looks at the same values in another shape.
_FREE_OPERATIONS = frozenset(("empty", "new_empty", "_unsafe_view", "_reshape_alias"))

_Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTime:
    """The time of one pass of a call, and what was seen meanwhile.

    `does_work` tells that something is computed; a view of the same memory costs a GPU nothing.
    """

    summary: TimingSummary
    seen: Observation
    kernel_name: str = ""
    does_work: bool = True


# A call has the passes that exist: no backward one where no gradient goes through.
CallTimes = Mapping[Phase, PassTime]


class CallTimer:
    """Times calls one after the other with the same device and random values."""

    def __init__(self, rig: Rig, tensors: TensorFactory, *, has_backward: bool) -> None:
        """Time on `rig`, backward passes too with `has_backward`."""
        timer = dataclasses.replace(
            rig.timer,
            case_s_max=min(rig.timer.case_s_max, _CASE_S_MAX),
            warm_up_s_max=min(rig.timer.warm_up_s_max, _WARM_UP_S_MAX),
        )
        self._rig = dataclasses.replace(rig, timer=timer)
        self._tensors = tensors
        self._has_backward = has_backward

    def time(self, call: TracedCall, integers: Sequence[torch.Tensor]) -> CallTimes:
        """Time a call; `integers` are its inputs that are no real numbers.

        Raises:
            torch.OutOfMemoryError: its inputs or its result do not fit.
            RuntimeError: it does not run alone.

        """
        # A backward pass runs on the stream of its forward pass, so inputs are made on it, too.
        with torch.no_grad(), torch.cuda.stream(self._rig.stream):
            first = _Case(call, integers, self._tensors)
            cases = [first]
            cases += [
                _Case(call, integers, self._tensors) for _ in range(self._num_sets(first) - 1)
            ]
            target = str(call.target)
            found = {
                Phase.FORWARD: self._time(
                    [case.run_forward for case in cases], (target, Phase.FORWARD), call.key
                )
            }
            if not (self._has_backward and call.is_differentiable):
                return found
            steps = [case.prepare_backward(self._tensors) for case in cases]
            present = [step for step in steps if step is not None]
            if present:
                found[Phase.BACKWARD] = self._time(present, (target, Phase.BACKWARD), call.key)
            return found

    def time_entry_us(self) -> float:
        """Return µs of the host to start a backward pass: one step back, through a mere view.

        A model starts one and goes on from step to step; each call timed alone starts its own.
        Nothing on a GPU, where only the device's time counts.
        """
        if self._rig.device.is_cuda:
            return 0.0
        leaf = self._tensors.random(1).requires_grad_()
        with torch.enable_grad():
            output = leaf.view(1)
        gradient = self._tensors.random(1)

        def step() -> object:
            return torch.autograd.grad(
                [output], [leaf], [gradient], retain_graph=True, allow_unused=True
            )

        return self._time([step], ("view", Phase.BACKWARD), ()).summary.latency_us_median

    def time_sum_us(self, shape: TensorShape) -> float:
        """Return µs to add two gradients of that shape."""
        with torch.no_grad(), torch.cuda.stream(self._rig.stream):
            left, right = (_make(shape, self._tensors) for _ in range(2))
            timed = self._time([lambda: torch.add(left, right)], ("add", Phase.FORWARD), shape.key)
        return timed.summary.latency_us_median

    def _time(self, steps: Sequence[_Step], kind: tuple[str, Phase], shapes: Hashable) -> PassTime:
        does_work = _does_work(steps[0])
        if not does_work and self._rig.device.is_cuda:
            # Nothing is launched; between two events there would be the host's time.
            return PassTime(summary=summarize([0.0]), seen=Observation(), does_work=False)
        case = PreparedCase(
            call=lambda index: steps[index % len(steps)](),
            input_bytes=0,
            num_input_sets=len(steps),
            source=kind[0],
        )
        summary, seen, _ = time_prepared(case, ("fx", *kind), self._rig)
        name = ""
        if self._rig.namer is not None and does_work:
            name = self._rig.namer.trace(("fx", *kind), shapes, steps[0]).name
        return PassTime(summary=summary, seen=seen, kernel_name=name, does_work=does_work)

    def _num_sets(self, case: "_Case") -> int:
        """Return how many sets of inputs together are larger than the cache."""
        timer = self._rig.timer
        wanted = timer.rotation_cache_ratio * self._rig.cache_bytes
        if case.num_bytes >= 2 * wanted:
            return 1
        return min(math.ceil(wanted / max(case.num_bytes, 1)) + 1, timer.max_input_sets)


class _Case:
    """A call with one set of inputs."""

    def __init__(
        self, call: TracedCall, integers: Sequence[torch.Tensor], tensors: TensorFactory
    ) -> None:
        kept = iter(integers)
        leaves, layout = _pytree.tree_flatten(
            call.arguments, is_leaf=lambda leaf: isinstance(leaf, TensorShape)
        )
        values = [
            _fill(leaf, kept, tensors) if isinstance(leaf, TensorShape) else leaf for leaf in leaves
        ]
        self._target = _out_of_place(call.target)
        self._arguments, self._named = _pytree.tree_unflatten(values, layout)
        self._leaves = [
            value
            for leaf, value in zip(leaves, values, strict=True)
            if isinstance(leaf, TensorShape) and leaf.requires_grad
        ]
        self.num_bytes = sum(shape.num_bytes for shape in call.inputs)

    def run_forward(self) -> object:
        return self._target(*self._arguments, **self._named)

    def prepare_backward(self, tensors: TensorFactory) -> _Step | None:
        """Return what runs back through the call, None where no gradient comes out."""
        leaves = [leaf.requires_grad_() for leaf in self._leaves]
        with torch.enable_grad():
            result = self._target(*self._arguments, **self._named)
        outputs = [
            value
            for value in _pytree.tree_leaves(result)
            if isinstance(value, torch.Tensor) and value.requires_grad and not _is_in(value, leaves)
        ]
        if not outputs:
            return None
        gradients = [tensors.random(*output.shape, dtype=output.dtype) for output in outputs]

        def step() -> object:
            return torch.autograd.grad(
                outputs, leaves, gradients, retain_graph=True, allow_unused=True
            )

        return step


class _WorkCounter(TorchDispatchMode):  # type: ignore[misc] # torch's types are not read
    """Counts operations that compute, and not those that look at the same memory otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.num_working: int = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = str(func.overloadpacket.__name__)
        is_free = func.is_view or any(name.startswith(free) for free in _FREE_OPERATIONS)
        self.num_working += not is_free
        return func(*args, **(kwargs or {}))


def _does_work(step: _Step) -> bool:
    with _WorkCounter() as counter:
        step()
    return bool(counter.num_working)


def _is_in(value: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    return any(value is tensor for tensor in tensors)


def _fill(
    shape: TensorShape, integers: Iterator[torch.Tensor], tensors: TensorFactory
) -> torch.Tensor:
    if not shape.dtype.is_floating_point:
        return next(integers)
    return _make(shape, tensors)


def _make(shape: TensorShape, tensors: TensorFactory) -> torch.Tensor:
    """Return a random tensor that lies in memory as the traced one did."""
    values = tensors.random(shape.num_elements, dtype=shape.dtype)
    return values.as_strided(shape.shape, shape.stride).detach()


def _copied(target: torch.Tensor, source: torch.Tensor, *_: object) -> torch.Tensor:
    return source.expand_as(target).to(target.dtype, copy=True)


def _out_of_place(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the form of an operation that leaves its inputs as they are, where it has one.

    Repeated in place, values would run away.
    """
    if target is torch.ops.aten.copy_.default:
        return _copied
    packet = getattr(target, "overloadpacket", None)
    name = getattr(packet, "__name__", "")
    if not name.endswith("_") or name.startswith("_"):
        return target
    other = getattr(torch.ops.aten, name.removesuffix("_"), None)
    overload = getattr(target, "_overloadname", "default")
    found: Callable[..., Any] = getattr(other, overload, target) if other is not None else target
    return found
