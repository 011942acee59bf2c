"""What is planned, in which order, and what is left out."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiler_fakes import CPU

from foretoken.domain.errors import InvalidRequestError, UnknownOperatorError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operators.spec.operator import all_operators, find_operator
from foretoken.profiler.kernel import all_kernels, kernel_of_call
from foretoken.profiler.planning.coverage import KnownRows, Point, point_of_call
from foretoken.profiler.planning.plan import PlanLimits, ProfilePlan, make_plan, take_shard
from foretoken.profiler.planning.wanted_call import PlanSite

NO_REPEATS = PlanLimits(repeat_ratio=0.0)
HERE = PlanSite(device=CPU, torch_device=torch.device("cpu"), num_ranks=2)
GEMM = OperatorCall(operator="gemm", dtype=DType.FP32, dims={"m": 4, "n": 8, "k": 8})
TINY = find_model("tiny-llama")


def plan_of(
    limits: PlanLimits = NO_REPEATS,
    site: PlanSite = HERE,
    known: KnownRows | None = None,
    **request: object,
) -> ProfilePlan:
    asked = {"device": "cpu", "quick": True, **request}
    return make_plan(ProfileRequest(**asked), site, known or KnownRows(), limits)  # type: ignore[arg-type]


def points_of(plan: ProfilePlan) -> Counter[Point]:
    return Counter(point_of_call(call) for call in plan.all_calls)


def swept_operators() -> set[str]:
    return {name for name, spec in all_operators().items() if any(True for _ in spec.sweep(True))}


def test_every_swept_operator_of_one_device_has_a_kernel() -> None:
    expected = {name for name in swept_operators() if not find_operator(name).is_collective}
    assert expected == set(all_kernels())


def test_what_is_only_imported_has_no_sweep_and_cannot_be_timed() -> None:
    unswept = set(all_operators()) - swept_operators()
    assert {"host_step", "launch_gap", "lora_gemm"} == unswept
    for name in unswept:
        assert [] == list(find_operator(name).sweep(False))
        with pytest.raises(InvalidRequestError, match=f"no kernel runs {name}"):
            plan_of(operators=(name,))


def test_whole_quick_plan_covers_every_swept_operator_once_per_point() -> None:
    plan = plan_of()
    assert {call.operator for call in plan.all_calls} == swept_operators()
    assert max(points_of(plan).values()) == 1
    for call in plan.all_calls:
        find_operator(call.operator).check_dims(call.dims)


def test_every_planned_call_names_a_kernel_that_is_here() -> None:
    for call in plan_of().calls:
        assert call.kernel == kernel_of_call(call, torch.device("cpu")).source


def test_quick_plan_on_a_cpu_uses_one_dtype_unless_others_are_asked_for() -> None:
    assert {call.dtype for call in plan_of(operators=("gemm",)).calls} == {DType.FP32}
    asked = plan_of(operators=("gemm",), dtypes=(DType.BF16, DType.FP32))
    assert {call.dtype for call in asked.calls} == {DType.BF16, DType.FP32}


def test_backward_is_planned_where_the_kernel_has_one() -> None:
    phases = Counter(call.phase for call in plan_of(operators=("rms_norm",)).calls)
    assert phases[Phase.FORWARD] == phases[Phase.BACKWARD] > 0
    sampled = plan_of(operators=("sampler",)).calls
    assert {call.phase for call in sampled} == {Phase.FORWARD}


def test_same_seed_gives_the_same_order_and_another_seed_another() -> None:
    assert plan_of(seed=3) == plan_of(seed=3)
    assert plan_of(seed=3).calls != plan_of(seed=4).calls


def test_share_of_calls_is_repeated() -> None:
    once = plan_of(operators=("gemm",))
    twice = plan_of(PlanLimits(repeat_ratio=0.1), operators=("gemm",))
    assert len(twice.calls) == len(once.calls) + int(len(once.calls) * 0.1)
    assert set(points_of(twice)) == set(points_of(once))


def test_covered_points_are_left_out_unless_asked_for() -> None:
    whole = plan_of(operators=("gemm",)).calls
    known = KnownRows(covered={point_of_call(call) for call in whole[:10]})
    plan = plan_of(known=known, operators=("gemm",))
    assert (len(plan.calls), plan.num_covered) == (len(whole) - 10, 10)
    assert plan_of(known=known, operators=("gemm",), skip_covered=False).calls == whole


@given(st.integers(0, 200))
def test_rows_of_the_same_profile_count_one_by_one(num_done: int) -> None:
    """What is left and what is done are together the whole plan, repeats included."""
    limits = PlanLimits(repeat_ratio=0.2)
    whole = plan_of(limits, operators=("silu_mul",))
    done = whole.calls[:num_done]
    own = Counter(point_of_call(call) for call in done)
    for skip_covered in (True, False):
        plan = plan_of(
            limits,
            known=KnownRows(own=own),
            operators=("silu_mul",),
            skip_covered=skip_covered,
        )
        assert points_of(plan) + own == points_of(whole)
        assert plan.num_covered == len(done)


def test_calls_longer_than_the_limit_are_left_out() -> None:
    whole = plan_of(operators=("gemm",))
    plan = plan_of(PlanLimits(call_s_max=1e-3, repeat_ratio=0.0), operators=("gemm",))
    assert plan.num_too_long > 0
    assert len(plan.calls) + plan.num_too_long == len(whole.calls)


def test_collectives_need_a_second_rank() -> None:
    alone = replace(HERE, num_ranks=1)
    assert plan_of(site=alone).collectives == ()
    with pytest.raises(InvalidRequestError, match="at least two devices"):
        plan_of(site=alone, operators=("all_reduce",))


def test_collectives_of_more_ranks_than_there_are_are_not_planned() -> None:
    for call in plan_of().collectives:
        assert call.dims["devices_per_node"] <= 2
        assert call.dims.get("num_nodes", 1) == 1


def test_unknown_operator_is_refused() -> None:
    with pytest.raises(UnknownOperatorError, match="gemm"):
        plan_of(operators=("gemmm",))


def test_exactly_the_calls_asked_for_are_planned() -> None:
    plan = plan_of(calls=(GEMM,))
    assert [(call.operator, call.dims) for call in plan.calls] == [("gemm", GEMM.dims)]
    assert plan.left_out == {}


def test_call_no_kernel_runs_is_left_out_with_the_reason() -> None:
    odd = replace(GEMM, variant="quant=no_such_scheme")
    plan = plan_of(calls=(GEMM, odd))
    assert len(plan.calls) == 1
    assert plan.left_out == {"gemm (fp32 forward quant=no_such_scheme): no kernel runs it here": 1}


def test_call_with_wrong_dimensions_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="gemm"):
        plan_of(calls=(replace(GEMM, dims={"m": 1}),))


def test_warm_and_cold_are_different_points() -> None:
    cold, warm = plan_of(calls=(GEMM,)), plan_of(calls=(GEMM,), cache="warm")
    both = plan_of(calls=(GEMM,), cache="both")
    assert [call.variant for call in warm.calls] == ["cache=warm"]
    assert points_of(both) == points_of(cold) + points_of(warm)


def test_all_kernels_include_the_default_and_differ_in_identity() -> None:
    default = plan_of(operators=("rms_norm",))
    every = plan_of(operators=("rms_norm",), kernels="all")
    assert points_of(default) <= points_of(every)
    assert max(points_of(every).values()) == 1


def test_model_is_planned_for_a_device_that_is_not_here() -> None:
    away = PlanSite(
        device=find_device("h200_sxm"), torch_device=torch.device("cuda"), is_present=False
    )
    plan = plan_of(site=away, device="h200_sxm", models=(TINY,))
    assert {call.dtype for call in plan.calls} == {DType.BF16}
    assert {"gemm", "attention_prefill", "attention_decode"} <= {c.operator for c in plan.calls}


def test_operators_narrow_what_a_model_asks_for() -> None:
    plan = plan_of(models=(TINY,), operators=("rope", "silu_mul"))
    assert {call.operator for call in plan.calls} == {"rope", "silu_mul"}


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
    limits = [PlanLimits(repeat_ratio=0.1, shard_index=index, num_shards=2) for index in (0, 1)]
    shares = [plan_of(one, operators=("gemm",)) for one in limits]
    whole = plan_of(PlanLimits(repeat_ratio=0.1), operators=("gemm",))
    assert points_of(shares[0]) + points_of(shares[1]) == points_of(whole)


def test_profile_cut_into_another_number_of_shares_goes_on_with_the_rest() -> None:
    whole = plan_of(operators=("gemm",))
    done = Counter(point_of_call(call) for call in whole.calls[:30])
    limits = [PlanLimits(repeat_ratio=0.0, shard_index=index, num_shards=2) for index in (0, 1)]
    shares = [plan_of(one, known=KnownRows(earlier=done), operators=("gemm",)) for one in limits]
    assert points_of(shares[0]) + points_of(shares[1]) + done == points_of(whole)
