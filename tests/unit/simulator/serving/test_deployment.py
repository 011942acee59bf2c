"""Which of the two engines runs a plan, and what both write down of a pipeline."""

import dataclasses

import numpy as np
import pytest

from foretoken.domain.engine import EngineProfile
from foretoken.simulator.cost_tables import CostTables, flat_tables
from foretoken.simulator.serving.deployment import (
    must_compile,
    run_deployment,
    takes_fast_path,
    warm_up,
)
from foretoken.simulator.serving.fast.simulation import is_ready
from foretoken.simulator.serving.request_plan import RequestPlan, plan_requests
from foretoken.simulator.serving.setup import DeploymentSetup

_SETUP = DeploymentSetup(profile=EngineProfile(name="plain", engine="plain"), num_kv_blocks=1000)
_TABLES = flat_tables()


def _plan(num_requests: int, num_tokens: int) -> RequestPlan:
    one = np.ones(num_requests, dtype=np.int64)
    return plan_requests(0 * one, 20 * one, num_tokens * one)


def test_a_tiny_plan_is_not_worth_loading_compiled_code() -> None:
    warm_up(_SETUP, _TABLES)
    assert not takes_fast_path(_plan(2, 20), _SETUP)


def test_a_small_plan_takes_compiled_code_that_is_ready() -> None:
    plan = _plan(100, 200)
    assert takes_fast_path(plan, _SETUP) == is_ready(_SETUP)
    warm_up(_SETUP, _TABLES)
    assert is_ready(_SETUP)
    assert takes_fast_path(plan, _SETUP)


def test_a_large_plan_is_worth_compiling_for() -> None:
    plan = _plan(1000, 500)
    assert takes_fast_path(plan, _SETUP)
    assert must_compile(plan, _SETUP) == (not is_ready(_SETUP))
    warm_up(_SETUP, _TABLES)
    assert not must_compile(plan, _SETUP)


def test_rules_that_compiled_code_does_not_know_are_the_references() -> None:
    assert not takes_fast_path(
        _plan(1000, 500), dataclasses.replace(_SETUP, router="somewhere_else")
    )


@pytest.mark.parametrize("uses_fast_path", [True, False])
def test_a_setup_may_say_what_runs_it(*, uses_fast_path: bool) -> None:
    setup = dataclasses.replace(_SETUP, uses_fast_path=uses_fast_path)
    assert takes_fast_path(_plan(2, 20), setup) == uses_fast_path


@pytest.mark.parametrize("uses_fast_path", [True, False])
def test_tokens_that_leave_a_pipeline_at_every_other_step_are_one_run(
    *, uses_fast_path: bool
) -> None:
    """A batch has room for one of two prompts, so that each is in batches of its own, in turn."""
    profile = dataclasses.replace(_SETUP.profile, max_num_batched_tokens=20)
    setup = dataclasses.replace(_SETUP, profile=profile, uses_fast_path=uses_fast_path)
    tokens = run_deployment(_plan(2, 50), setup, _two_stages(), lambda _: None).tokens
    assert tokens.request.tolist() == [0, 1]
    assert tokens.stride.tolist() == [2, 2]
    assert tokens.count.tolist() == [50, 50]


def _two_stages() -> CostTables:
    changed = {
        name: np.concatenate([column, column])
        for name, column in _TABLES._asdict().items()
        if name.endswith("_us")
    }
    return _TABLES._replace(**changed)
