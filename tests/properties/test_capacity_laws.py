"""What a capacity search leaves out never changes its verdicts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_strategies import SCHEDULERS, Case, cases

from foretoken.domain.metrics.request import LIMITED
from foretoken.domain.requests.search import LatencyLimit, ServingTargets
from foretoken.domain.requests.slo import Slo
from foretoken.simulator.search.capacity.probe import Judge, count_unseen
from foretoken.simulator.search.capacity.rate import stretch_plan, take_requests

_MS = 1e-3


@st.composite
def _open_cases(draw: st.DrawFn, scheduler: str) -> Case:
    """Draw a workload that is no closed loop."""
    case = draw(cases(scheduler))
    return replace(case, plan=replace(case.plan, concurrency=0))


@st.composite
def _judges(draw: st.DrawFn) -> Judge:
    """Draw targets about as long as steps of the drawn engines take."""
    times = st.sampled_from((0.5, 3.0, 20.0, 100.0))
    limits = tuple(
        LatencyLimit(
            metric=metric,
            percentile=draw(st.sampled_from((0, 20, 50, 90, 99, 100))),
            limit_ms=draw(times) * _MS,
        )
        for metric in LIMITED
    )
    slo = Slo(
        ttft_ms=draw(times) * _MS,
        itl_ms=draw(times) * _MS,
        itl_percentile=draw(st.sampled_from((50.0, 99.0))),
    )
    return Judge(ServingTargets(limits=limits, slo_attainment_ratio=0.7), (slo,))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_what_first_requests_miss_all_miss(scheduler: str) -> None:
    """No figure of a run of the first requests is above that of all, so no run is cut that meets.

    Of attainment none is below.
    """

    # All schedulers together draw as many as one law mostly does, and more.
    @settings(max_examples=25)
    @given(case=_open_cases(scheduler), judge=_judges(), data=st.data())
    def compare(case: Case, judge: Judge, data: st.DataObject) -> None:
        num_first = data.draw(st.integers(0, case.plan.num_requests - 1))
        if num_first == 0:
            return
        whole = judge.judge(case.run())
        first = replace(case, plan=take_requests(case.plan, np.arange(num_first)))
        kind = judge.judge_kindly(first.run(), count_unseen(case.plan, num_first))
        for found, limit in zip(kind.outcomes[:-1], whole.outcomes[:-1], strict=True):
            assert found.value <= limit.value * (1 + 1e-12)
        assert kind.outcomes[-1].value >= whole.outcomes[-1].value
        assert kind.is_met or not whole.is_met

    compare()


@given(case=_open_cases("chunked_prefill"), ratio=st.sampled_from((0.0, 0.5, 1.0, 7.0)))
def test_stretching_keeps_requests_and_think_times(case: Case, ratio: float) -> None:
    """Only arrivals move, all by one ratio."""
    stretched = stretch_plan(case.plan, ratio)
    assert stretched.arrival_ns.tolist() == np.rint(case.plan.arrival_ns * ratio).tolist()
    for name in ("num_prefill_tokens", "num_decode_tokens", "think_ns", "follows", "hashes"):
        assert getattr(stretched, name).tolist() == getattr(case.plan, name).tolist()


@given(case=_open_cases("chunked_prefill"), data=st.data())
def test_taking_requests_keeps_what_they_are(case: Case, data: st.DataObject) -> None:
    """Each keeps its lengths and hashes; it follows who it followed, if that one is there."""
    plan = case.plan
    kept = sorted(data.draw(st.sets(st.integers(0, plan.num_requests - 1), min_size=1)))
    taken = take_requests(plan, np.array(kept))
    for place, row in enumerate(kept):
        assert taken.num_prefill_tokens[place] == plan.num_prefill_tokens[row]
        mine = slice(*taken.hash_offsets[place : place + 2])
        old = slice(*plan.hash_offsets[row : row + 2])
        assert taken.hashes[mine].tolist() == plan.hashes[old].tolist()
        before = int(plan.follows[row])
        expected = kept.index(before) if before in kept else -1
        assert taken.follows[place] == expected
