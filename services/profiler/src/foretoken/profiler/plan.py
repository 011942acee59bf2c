"""Decide which operator calls to time, and in which order."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.estimate import DType, OperatorCall, Phase
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.hardware.roofline import compute_terms
from foretoken.domain.operator import OperatorSpec, all_operators, find_operator
from foretoken.domain.ports import ProfileRequest
from foretoken.domain.units import US_PER_S
from foretoken.profiler.kernel import all_kernels
from foretoken.profiler.local_device import CPU
from foretoken.profiler.shard import take_shard

# A group of one rank has no links to time.
_FEWEST_RANKS = 2

# (operator, phase, dtype, dimensions): the identity of a measured point.
Point = tuple[str, str, str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLimits:
    """What bounds a plan: local ranks, the longest call, repeats for noise, this pod's share."""

    num_ranks: int = 1
    call_s_max: float = 1.0
    repeat_ratio: float = 0.05
    shard_index: int = 0
    num_shards: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilePlan:
    """Calls in the order to time them; collectives apart, as they need several processes."""

    calls: tuple[OperatorCall, ...]
    collectives: tuple[OperatorCall, ...] = ()
    num_covered: int = 0
    num_too_long: int = 0

    @property
    def num_skipped(self) -> int:
        """Calls of the sweep that need no timing, or too much of it."""
        return self.num_covered + self.num_too_long


def point_of_call(call: OperatorCall) -> Point:
    """Return the identity of a call, whatever the order of its dimensions."""
    return point_of(call.operator, call.phase.name, call.dtype.name, call.dims)


def point_of(operator: str, phase: str, dtype: str, dims: Mapping[str, int]) -> Point:
    """Return the identity of a point from its names in any case."""
    return operator, phase.lower(), dtype.lower(), tuple(sorted(dims.items()))


def sweep_dtypes(device: str, quick: bool) -> tuple[DType, ...]:
    """Return the number formats worth timing on a device.

    A quick sweep takes one: fp32 on CPUs, as half precision is slow on those without matrix units
    for it and its rounding says little about other machines; bf16 on GPUs, where models run.
    """
    if device == CPU:
        return (DType.FP32,) if quick else (DType.FP32, DType.BF16)
    return (DType.BF16,) if quick else (DType.BF16, DType.FP16)


def check_operators(names: Sequence[str], num_ranks: int) -> None:
    """Check that operators asked for by name can be timed here.

    Raises:
        UnknownOperatorError: one does not exist.
        InvalidRequestError: no kernel runs one, or a collective has no second rank.

    """
    for name in names:
        spec = find_operator(name)
        if spec.is_collective and num_ranks < _FEWEST_RANKS:
            raise InvalidRequestError.of_field(
                "operators", f"{name} needs at least two devices on this machine"
            )
        if not spec.is_collective and name not in all_kernels():
            raise InvalidRequestError.of_field("operators", f"no kernel runs {name} here")


def make_plan(
    request: ProfileRequest,
    device: DeviceSpec,
    find_covered: Callable[[str], set[Point]],
    limits: PlanLimits,
) -> ProfilePlan:
    """Return the calls to time: each operator's sweep less what `find_covered(operator)` has.

    The order is random, from the request's seed: neighbours in a sweep then do not share a
    moment's noise. A share of the calls comes twice, at different moments. A pod's part is taken
    before covered points are left out, so that pods that start later still get their own.
    An operator without a sweep is only imported: none of it is planned.

    Raises:
        UnknownOperatorError: the request names an operator that does not exist.
        InvalidRequestError: it names one that cannot be timed here.

    """
    check_operators(request.operators, limits.num_ranks)
    chosen = _chosen_operators(request.operators, limits.num_ranks)
    wanted = [call for spec in chosen for call in _sweep_calls(spec, request, device, limits)]
    order = random.Random(request.seed)  # noqa: S311 - an order to measure in, not a secret
    calls = _shuffle(wanted, limits.repeat_ratio, order)
    calls = take_shard(calls, limits.shard_index, limits.num_shards)
    short = [call for call in calls if _call_s(call, device) <= limits.call_s_max]
    known: set[Point] = set()
    if request.skip_covered:
        known = {point for spec in chosen for point in find_covered(spec.name)}
    missing = [call for call in short if point_of_call(call) not in known]
    return ProfilePlan(
        calls=tuple(call for call in missing if not _is_collective(call)),
        collectives=tuple(call for call in missing if _is_collective(call)),
        num_covered=len(short) - len(missing),
        num_too_long=len(calls) - len(short),
    )


def _chosen_operators(names: Sequence[str], num_ranks: int) -> list[OperatorSpec]:
    return [
        spec
        for spec in all_operators().values()
        if (not names or spec.name in names)
        and (num_ranks >= _FEWEST_RANKS if spec.is_collective else spec.name in all_kernels())
    ]


def _sweep_calls(
    spec: OperatorSpec, request: ProfileRequest, device: DeviceSpec, limits: PlanLimits
) -> Iterator[OperatorCall]:
    phases = _phases(spec)
    for dtype in sweep_dtypes(device.name, request.quick):
        for dims in _unique(spec.sweep(request.quick)):
            if spec.is_collective and dims["devices_per_node"] > limits.num_ranks:
                continue
            for phase in phases:
                yield OperatorCall(operator=spec.name, dtype=dtype, phase=phase, dims=dims)


def _phases(spec: OperatorSpec) -> tuple[Phase, ...]:
    if spec.is_collective or not all_kernels()[spec.name].differentiable:
        return (Phase.FORWARD,)
    return (Phase.FORWARD, Phase.BACKWARD)


def _unique(sweep: Iterable[Mapping[str, int]]) -> list[Mapping[str, int]]:
    return list({tuple(sorted(dims.items())): dims for dims in sweep}.values())


def _call_s(call: OperatorCall, device: DeviceSpec) -> float:
    if _is_collective(call):
        return 0.0
    spec = find_operator(call.operator)
    terms = compute_terms(spec, call.dims, call.dtype, call.phase, device)
    return float(max(terms.compute_us, terms.memory_us)) / US_PER_S


def _is_collective(call: OperatorCall) -> bool:
    return find_operator(call.operator).is_collective


def _shuffle(
    calls: Sequence[OperatorCall], repeat_ratio: float, order: random.Random
) -> tuple[OperatorCall, ...]:
    num_repeats = int(len(calls) * repeat_ratio)
    shuffled = [*calls, *order.sample(list(calls), num_repeats)]
    order.shuffle(shuffled)
    return tuple(shuffled)
