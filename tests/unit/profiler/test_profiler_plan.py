"""What is planned, in which order, and what is left out."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiler_fakes import CPU

from foretoken.domain.errors import InvalidRequestError, UnknownOperatorError
from foretoken.domain.estimate import DType, Phase
from foretoken.domain.operator import all_operators, find_operator
from foretoken.domain.ports import ProfileRequest
from foretoken.profiler.kernel import all_kernels
from foretoken.profiler.plan import PlanLimits, ProfilePlan, make_plan, point_of_call
from foretoken.profiler.shard import take_shard

NO_REPEATS = PlanLimits(num_ranks=2, repeat_ratio=0.0)


def plan_of(limits: PlanLimits = NO_REPEATS, **request: object) -> ProfilePlan:
    asked = ProfileRequest(device="cpu", quick=True, **request)  # type: ignore[arg-type]
    return make_plan(asked, CPU, lambda _: set(), limits)


def swept_operators() -> set[str]:
    return {name for name, spec in all_operators().items() if any(True for _ in spec.sweep(True))}


def test_every_swept_operator_of_one_device_has_a_kernel() -> None:
    expected = {name for name in swept_operators() if not find_operator(name).is_collective}
    assert expected == set(all_kernels())


def test_only_work_of_the_host_has_no_sweep_and_cannot_be_timed() -> None:
    assert {"host_step"} == set(all_operators()) - swept_operators()
    assert [] == list(find_operator("host_step").sweep(False))
    with pytest.raises(InvalidRequestError, match="no kernel runs host_step"):
        plan_of(operators=("host_step",))


def test_whole_quick_plan_covers_every_swept_operator_once_per_point() -> None:
    plan = plan_of()
    calls = (*plan.calls, *plan.collectives)
    assert {call.operator for call in calls} == swept_operators()
    assert max(Counter(point_of_call(call) for call in calls).values()) == 1
    for call in calls:
        find_operator(call.operator).check_dims(call.dims)


def test_quick_plan_on_a_cpu_uses_one_dtype() -> None:
    assert {call.dtype for call in plan_of().calls} == {DType.FP32}


def test_backward_is_planned_where_the_kernel_has_one() -> None:
    phases = Counter(call.phase for call in plan_of(operators=("rms_norm",)).calls)
    assert phases[Phase.FORWARD] == phases[Phase.BACKWARD] > 0
    assert {call.phase for call in plan_of(operators=("gemm",)).calls} == {Phase.FORWARD}


def test_same_seed_gives_the_same_order_and_another_seed_another() -> None:
    assert plan_of(seed=3) == plan_of(seed=3)
    assert plan_of(seed=3).calls != plan_of(seed=4).calls


def test_share_of_calls_is_repeated() -> None:
    once = plan_of(operators=("gemm",)).calls
    twice = plan_of(PlanLimits(repeat_ratio=0.1), operators=("gemm",)).calls
    assert len(twice) == len(once) + int(len(once) * 0.1)
    assert {point_of_call(call) for call in twice} == {point_of_call(call) for call in once}


def test_covered_points_are_left_out_unless_asked_for() -> None:
    whole = plan_of(operators=("gemm",)).calls
    covered = {point_of_call(call) for call in whole[:10]}
    request = ProfileRequest(device="cpu", quick=True, operators=("gemm",))
    plan = make_plan(request, CPU, lambda _: covered, NO_REPEATS)
    assert (len(plan.calls), plan.num_covered) == (len(whole) - 10, 10)
    again = ProfileRequest(device="cpu", quick=True, operators=("gemm",), skip_covered=False)
    assert make_plan(again, CPU, lambda _: covered, NO_REPEATS).calls == whole


def test_calls_longer_than_the_limit_are_left_out() -> None:
    whole = plan_of(operators=("gemm",))
    plan = plan_of(PlanLimits(call_s_max=1e-3, repeat_ratio=0.0), operators=("gemm",))
    assert plan.num_too_long > 0
    assert len(plan.calls) + plan.num_too_long == len(whole.calls)


def test_collectives_need_a_second_rank() -> None:
    assert plan_of(PlanLimits(num_ranks=1)).collectives == ()
    with pytest.raises(InvalidRequestError, match="at least two devices"):
        plan_of(PlanLimits(num_ranks=1), operators=("all_reduce",))


def test_unknown_operator_is_refused() -> None:
    with pytest.raises(UnknownOperatorError, match="gemm"):
        plan_of(operators=("gemmm",))


@given(st.integers(min_value=1, max_value=9), st.integers(min_value=0, max_value=200))
def test_shards_partition_the_plan(num_shards: int, size: int) -> None:
    plan = list(range(size))
    shares = [take_shard(plan, index, num_shards) for index in range(num_shards)]
    assert sorted(entry for share in shares for entry in share) == plan
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_shard_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="shard_index"):
        take_shard([1, 2], 2, 2)


def test_pods_that_start_later_keep_their_own_share() -> None:
    """What other pods have recorded meanwhile must not move a pod's share."""
    request = ProfileRequest(device="cpu", quick=True, operators=("gemm",))
    shares = [PlanLimits(repeat_ratio=0.0, shard_index=index, num_shards=2) for index in (0, 1)]
    first = make_plan(request, CPU, lambda _: set(), shares[0]).calls
    recorded = {point_of_call(call) for call in first}
    second = make_plan(request, CPU, lambda _: recorded, shares[1]).calls
    whole = plan_of(operators=("gemm",)).calls
    assert {point_of_call(call) for call in (*first, *second)} == set(map(point_of_call, whole))
