"""What a plan would time, and for how long."""

from collections import Counter, defaultdict

from foretoken.domain.measurements.profiling import OperatorOutline, ProfileOutline
from foretoken.profiler.planning.durations import CaseDurations
from foretoken.profiler.planning.plan import ProfilePlan
from foretoken.profiler.timing.memory import needed_bytes


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
