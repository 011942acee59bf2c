"""A deployment that is stopped and goes on does what it does at once; one may end a loop early."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from cluster_strategies import ClusterCase, cluster_cases
from hypothesis import given
from hypothesis import strategies as st
from serving_strategies import Case, rich_cases

from foretoken.domain.frameworks.engine import find_engine
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.search.capacity.rate import take_requests
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import ClusterRun, DeploymentRun, EngineRun
from foretoken.simulator.workload.request_plan import NONE, RequestPlan, plan_requests


def _start(case: Case | ClusterCase, plan: RequestPlan | None = None) -> DeploymentRun:
    plan = plan or case.plan
    if isinstance(case, ClusterCase):
        return DeploymentRun(engines=ClusterRun(plan, case.setup, case.tables), groups=())
    return DeploymentRun(engines=EngineRun(plan, case.setup, case.tables), groups=())


def _columns(record: ServingRecord) -> dict[str, Any]:
    """Return all columns of a record by name."""
    parts = {"requests": record.requests, "tokens": record.tokens}
    parts |= {f"steps {engine}": steps for engine, steps in enumerate(record.steps)}
    columns: dict[str, Any] = {
        f"{part}.{column.name}": np.asarray(getattr(each, column.name)).tolist()
        for part, each in parts.items()
        for column in fields(each)
    }
    return {**columns, "pools": record.pools}


def _say_nothing(_: float) -> None:
    pass


@pytest.mark.parametrize("cases", [rich_cases(), cluster_cases()], ids=["engines", "cluster"])
@given(st.data())
def test_a_run_in_pieces_is_the_run_at_once(cases: Any, data: st.DataObject) -> None:
    """What was asked for is done after each piece, and the end is the same to the nanosecond."""
    case = data.draw(cases)
    num_requests = case.plan.num_requests
    whole, pieces = _start(case), _start(case)
    whole.go_on(num_requests, _say_nothing)

    for num_first in sorted(data.draw(st.lists(st.integers(0, num_requests), max_size=3))):
        pieces.go_on(num_first, _say_nothing)
        if num_first:
            assert np.asarray(pieces.record().requests.outcome)[:num_first].all()
    pieces.go_on(num_requests, _say_nothing)

    assert _columns(whole.record()) == _columns(pieces.record())


@pytest.mark.parametrize("cases", [rich_cases(), cluster_cases()], ids=["engines", "cluster"])
@given(st.data())
def test_a_loop_that_ends_early_is_a_loop_of_those_it_sent(cases: Any, data: st.DataObject) -> None:
    """Requests that were not sent leave no trace."""
    case = data.draw(cases)
    num_requests = case.plan.num_requests
    none = np.full(num_requests, NONE, dtype=np.int64)
    plan = replace(case.plan, follows=none, joins=None, concurrency=data.draw(st.integers(1, 4)))
    num_first = data.draw(st.integers(1, num_requests))
    run = _start(case, plan)

    run.go_on(num_first, _say_nothing)
    run.send_no_more()
    run.go_on(num_requests, _say_nothing)

    requests = run.record().requests
    sent = np.asarray(requests.arrival_ns) >= 0
    num_sent = int(sent.sum())
    assert num_first <= num_sent
    assert sent.tolist() == [True] * num_sent + [False] * (num_requests - num_sent)
    alone = _start(case, take_requests(plan, np.arange(num_sent)))
    alone.go_on(num_sent, _say_nothing)
    for column in fields(requests):
        found, expected = (
            getattr(requests, column.name),
            getattr(alone.record().requests, column.name),
        )
        assert (found is None) == (expected is None)
        if found is not None:
            assert np.asarray(expected).tolist() == np.asarray(found)[:num_sent].tolist()


def test_engines_are_looked_at_now_and_then() -> None:
    """A long run stops soon after those are done that it was to go on for."""
    one = np.ones(600, dtype=np.int64)
    plan = replace(plan_requests(0 * one, 20 * one, 50 * one), concurrency=2)
    setup = DeploymentSetup(profile=find_engine("vllm-0.20"), num_kv_blocks=1000)
    run = DeploymentRun(engines=EngineRun(plan, setup, flat_tables(1000.0, 10.0)), groups=())

    run.go_on(100, _say_nothing)
    run.send_no_more()
    run.go_on(600, _say_nothing)

    num_done = int(np.count_nonzero(run.record().requests.outcome))
    # A thousand steps are 40 requests, two at a time.
    assert 100 <= num_done <= 142
