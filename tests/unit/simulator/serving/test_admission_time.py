"""What joins a step takes the host's time, by the tokens of its prompt."""

from dataclasses import replace

import numpy as np

from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import plan_requests

_PROFILE = EngineProfile(name="mine", engine="mine", max_num_seqs=8)
_PROMPTS = np.array([10, 20])


def _run(us_per_token: float) -> ServingRecord:
    """Run two requests that come at once and have five tokens each, a µs a step."""
    profile = replace(_PROFILE, admission_us_per_token=us_per_token)
    plan = plan_requests(0 * _PROMPTS, _PROMPTS, 0 * _PROMPTS + 5)
    setup = DeploymentSetup(profile=profile, num_kv_blocks=1000, num_engines=1)
    return run_deployment(plan, setup, flat_tables(1.0, 0.0), lambda _: None)


def test_a_step_waits_for_all_the_prompts_that_join_it() -> None:
    """Ten and twenty tokens of 2 µs: both get their first token 60 µs later, and all others."""
    without, found = _run(0.0).requests, _run(2.0).requests
    assert [60_000, 60_000] == (found.first_token_ns - without.first_token_ns).tolist()
    assert [60_000, 60_000] == (found.finished_ns - without.finished_ns).tolist()
