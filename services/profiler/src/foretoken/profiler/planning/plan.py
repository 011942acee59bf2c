"""Decide which operator calls to time, in which order, on which pod, and for how long."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.hardware.roofline import compute_terms
from foretoken.domain.measurements.estimate import OperatorCall
from foretoken.domain.measurements.profiling import OperatorOutline, ProfileOutline, ProfileRequest
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.overlap import is_group_call
from foretoken.domain.operators.spec.variant import least_element_bytes
from foretoken.domain.units import US_PER_S
from foretoken.profiler.local_device import CPU
from foretoken.profiler.planning.coverage import KnownRows, Point, point_of_call
from foretoken.profiler.planning.durations import CaseDurations
from foretoken.profiler.planning.wanted_call import PlanSite, wanted_calls
from foretoken.profiler.ranks.rows import in_group_order
from foretoken.profiler.timing.case import needed_bytes

T = TypeVar("T")


def take_shard(plan: Sequence[T], shard_index: int, num_shards: int) -> tuple[T, ...]:
    """Return every `num_shards`-th entry from `shard_index` on: shares of equal mix and size.

    All pods must make the plan from the same seed.

    Raises:
        InvalidRequestError: there is no such shard.

    """
    if not 0 <= shard_index < num_shards:
        raise InvalidRequestError.of_field(
            "shard_index", f"{shard_index} is not a share of {num_shards}"
        )
    return tuple(plan[shard_index::num_shards])


# What one core of a server does in fp32. The roofline of the `cpu` device is the best that any CPU
# can do, 20 to 200 times as much. Source: GEMMs, attention and streams on one core of a 2.6 GHz
# EPYC 9004 ran at 40 to 80 GFLOP/s and 2 to 30 GB/s.
_CORE_FLOPS_PER_S = 5e10
_CORE_BYTES_PER_S = 5e9


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLimits:
    """What bounds a plan: the longest call, repeats for noise, this pod's share."""

    call_s_max: float = 1.0
    repeat_ratio: float = 0.05
    shard_index: int = 0
    num_shards: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilePlan:
    """Calls in the order to time them; collectives apart, as they need several processes.

    `covered` counts by operator the calls that need no timing, `left_out` by reason those that
    cannot be timed here.
    """

    calls: tuple[OperatorCall, ...]
    collectives: tuple[OperatorCall, ...] = ()
    covered: Counter[str] = field(default_factory=Counter)
    num_too_long: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def all_calls(self) -> tuple[OperatorCall, ...]:
        """Everything to time."""
        return (*self.calls, *self.collectives)

    @property
    def num_unsupported(self) -> int:
        """Calls that no kernel runs here, or that need more devices."""
        return self.left_out.total()

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out, and why; the most frequent first."""
        return tuple(f"{count:,} left out: {why}" for why, count in self.left_out.most_common())

    @property
    def num_covered(self) -> int:
        """Calls that need no timing."""
        return self.covered.total()

    @property
    def num_skipped(self) -> int:
        """Calls of the sweep that need no timing, or too much of it."""
        return self.num_covered + self.num_too_long


def make_plan(
    request: ProfileRequest, site: PlanSite, known: KnownRows, limits: PlanLimits
) -> ProfilePlan:
    """Return the calls to time: all that the request covers less what is known.

    The order is random, from the request's seed: neighbours in a sweep then do not share a
    moment's noise. A share of the calls comes twice, at different moments. A pod's part is taken
    before known points are left out, so that pods that start later still get their own. Rows of
    the same profile count one by one, a repeated call's twice.

    Raises:
        UnknownOperatorError: the request names an operator that does not exist.
        InvalidRequestError: it names one that cannot be timed here, or no model can be cut so.

    """
    wanted, left_out = wanted_calls(request, site)
    order = random.Random(request.seed)  # noqa: S311 - an order to measure in, not a secret
    calls = _subtract(_shuffle(wanted, limits.repeat_ratio, order), known.earlier)
    share = take_shard(calls, limits.shard_index, limits.num_shards)
    short = [call for call in share if _call_s(call, site.device) <= limits.call_s_max]
    missing = _subtract(short, known.own)
    if request.skip_covered:
        missing = [call for call in missing if point_of_call(call) not in known.covered]
    covered = Counter(call.operator for call in short)
    covered.subtract(call.operator for call in missing)
    return ProfilePlan(
        calls=tuple(call for call in missing if not is_group_call(call)),
        collectives=in_group_order(call for call in missing if is_group_call(call)),
        covered=+covered,
        num_too_long=len(share) - len(short),
        left_out=left_out,
    )


def _subtract(calls: Iterable[OperatorCall], known: Counter[Point]) -> list[OperatorCall]:
    """Return the calls but as many of each point as are known."""
    left = Counter(known)
    missing = []
    for call in calls:
        point = point_of_call(call)
        if left[point] > 0:
            left[point] -= 1
        else:
            missing.append(call)
    return missing


def _call_s(call: OperatorCall, device: DeviceSpec) -> float:
    """Return about how long a call takes: its roofline, on a CPU that of a slow core."""
    if is_group_call(call):
        return 0.0
    spec = find_operator(call.operator)
    if device.name == CPU:
        element_bytes = least_element_bytes(call.dtype, call.variant)
        flops = float(spec.flops(call.dims, element_bytes))
        moved = float(spec.moved_bytes(call.dims, element_bytes))
        slowest_s = max(flops / _CORE_FLOPS_PER_S, moved / _CORE_BYTES_PER_S)
        return slowest_s * spec.work_ratio(call.phase)
    terms = compute_terms(spec, call.dims, call.dtype, call.phase, device)
    return float(max(terms.compute_us, terms.memory_us)) / US_PER_S


def _shuffle(
    calls: Sequence[OperatorCall], repeat_ratio: float, order: random.Random
) -> list[OperatorCall]:
    num_repeats = int(len(calls) * repeat_ratio)
    shuffled = [*calls, *order.sample(list(calls), num_repeats)]
    order.shuffle(shuffled)
    return shuffled


def outline_plan(
    name: str, device: str, plan: ProfilePlan, durations: CaseDurations, allowed_bytes: float
) -> ProfileOutline:
    """Return the outline of a plan; calls that need more than `allowed_bytes` will fail."""
    num_calls = Counter(call.operator for call in plan.all_calls)
    seconds: defaultdict[str, float] = defaultdict(float)
    num_failing = 0
    for call in plan.all_calls:
        if needed_bytes(call) > allowed_bytes:
            num_failing += 1
        else:
            seconds[call.operator] += durations.estimate_s(call)
    operators = tuple(
        OperatorOutline(
            operator=operator,
            num_calls=num_calls[operator],
            num_covered=plan.covered[operator],
            estimated_s=seconds[operator],
        )
        for operator in sorted({*num_calls, *plan.covered})
    )
    return ProfileOutline(
        name=name,
        device=device,
        num_calls=num_calls.total(),
        num_covered=plan.num_covered,
        num_too_long=plan.num_too_long,
        num_failing=num_failing,
        num_unsupported=plan.num_unsupported,
        notes=plan.notes,
        estimated_s=sum(entry.estimated_s for entry in operators),
        operators=operators,
    )
