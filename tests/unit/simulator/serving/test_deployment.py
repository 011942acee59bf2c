"""What runs a deployment: compiled once, named where it cannot be, and a pipeline written down."""

import dataclasses

import numpy as np
import pytest

from foretoken.domain.errors import UnknownPluginError
from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import ServingSearchRequest, ServingSpace
from foretoken.simulator.cost.tables import CostTables, flat_tables
from foretoken.simulator.search.jobs import schedulers_of
from foretoken.simulator.serving.compilation import must_compile, warm_up
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import RequestPlan, plan_requests

_SETUP = DeploymentSetup(profile=EngineProfile(name="plain", engine="plain"), num_kv_blocks=1000)
_TABLES = flat_tables()


def _plan(num_requests: int, num_tokens: int) -> RequestPlan:
    one = np.ones(num_requests, dtype=np.int64)
    return plan_requests(0 * one, 20 * one, num_tokens * one)


def test_what_has_been_compiled_need_not_be_compiled() -> None:
    warm_up(_SETUP, _TABLES)
    assert not must_compile(_SETUP)


def test_a_search_waits_for_the_schedulers_of_its_engines_alone() -> None:
    scenario = ServingScenario(model=find_model("llama-3-8b"), device="h100_sxm")
    space = ServingSpace(profiles=("vllm-0.19", "sglang-0.5", "vllm-0.8"))
    asked = ServingSearchRequest(scenario=scenario)
    assert schedulers_of(asked) == ("chunked_prefill",)
    assert schedulers_of(dataclasses.replace(asked, space=space)) == ("chunked_prefill", "sglang")


@pytest.mark.parametrize(
    ("changes", "near"),
    [
        ({"router": "least_load"}, "least_loaded"),
        ({"profile": dataclasses.replace(_SETUP.profile, scheduler="orka")}, "orca"),
    ],
)
def test_rules_that_no_engine_has_are_refused(changes: dict[str, object], near: str) -> None:
    setup = dataclasses.replace(_SETUP, **changes)  # type: ignore[arg-type]
    with pytest.raises(UnknownPluginError, match=near):
        run_deployment(_plan(2, 20), setup, _TABLES, lambda _: None)


def test_tokens_that_leave_a_pipeline_at_every_other_step_are_one_run() -> None:
    """A batch has room for one of two prompts, so that each is in batches of its own, in turn."""
    profile = dataclasses.replace(_SETUP.profile, max_num_batched_tokens=20)
    setup = dataclasses.replace(_SETUP, profile=profile)
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
