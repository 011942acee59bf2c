"""Engines in lock step that deal new requests before every step, as TensorRT-LLM's ranks do."""

import numpy as np
import pytest

from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.simulator.cluster.engine_pool import PoolRole
from foretoken.simulator.cluster.setup import PoolSetup
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.engine.pool import EnginePool
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import plan_requests

_STEP_US = 10.0


def _setup(num_engines: int, max_num_seqs: int = 4, *, deals: bool = True) -> DeploymentSetup:
    profile = EngineProfile(
        name="mine", engine="mine", max_num_seqs=max_num_seqs, deals_requests=deals
    )
    return DeploymentSetup(
        profile=profile, num_kv_blocks=99, num_engines=num_engines, is_lock_step=True
    )


def _engines(prompts: list[int], arrival_us: list[int], setup: DeploymentSetup) -> list[int]:
    """Return which engine each request ran on."""
    plan = plan_requests(
        np.array(arrival_us) * 1000, np.array(prompts), np.ones(len(prompts), dtype=np.int64)
    )
    record = run_deployment(plan, setup, flat_tables(_STEP_US, 0.0), lambda _: None)
    return np.asarray(record.requests.engine).tolist()


def test_the_longest_prompt_goes_first_to_who_has_the_fewest_tokens() -> None:
    """One comes first, alone; of the others 9 to the first, 8 and 5, then 3 where fewest are."""
    prompts, arrival_us = [1, 3, 9, 5, 8], [0, 1, 2, 3, 4]
    assert [0, 0, 0, 1, 1] == _engines(prompts, arrival_us, _setup(2))
    assert [0, 1, 0, 1, 0] == _engines(prompts, arrival_us, _setup(2, deals=False))


def test_none_gets_more_than_its_share_of_requests() -> None:
    """Of four two each, though all but one are short."""
    assert [0, 0, 1, 1, 0] == _engines([1, 90, 2, 2, 1], [0, 1, 2, 3, 4], _setup(2))


def test_what_has_no_room_waits_for_all_of_them() -> None:
    """Two engines of one seat: of four that come during a step two wait, in the order they came."""
    engines = _engines([4, 1, 2, 3, 9], [0, 1, 2, 3, 4], _setup(2, max_num_seqs=1))
    assert [0, 1, 0, 1, 0] == engines


@pytest.mark.parametrize("role", [PoolRole.PREFILL, PoolRole.AGGREGATED])
def test_a_pool_knows_which_engine_has_a_request(role: PoolRole) -> None:
    two = np.array([2, 3])
    plan = plan_requests(np.zeros(2, dtype=np.int64), two, two)
    setup = PoolSetup(name="", engines=_setup(2), role=role, engines_per_replica=2)
    pool = EnginePool(plan, setup, flat_tables(_STEP_US, 0.0))
    for request in range(2):
        pool.submit(0, request, 0)
    pool.tick(0)
    assert [1, 0] == [pool.engine_of(request) for request in range(2)]


def test_blocks_are_freed_where_a_request_was_dealt_to() -> None:
    two = np.array([2, 3])
    plan = plan_requests(np.zeros(2, dtype=np.int64), two, two)
    setup = PoolSetup(name="", engines=_setup(2), role=PoolRole.PREFILL, engines_per_replica=2)
    pool = EnginePool(plan, setup, flat_tables(_STEP_US, 0.0))
    for request in range(2):
        pool.submit(0, request, 0)
    now_ns, ended = pool.advance(10**9)
    for request, _ in ended:
        pool.release(request, now_ns)
    assert [0, 1] == sorted(request for request, _ in ended)
    assert [0.0, 0.0] == [pool.load_of(engine).kv_utilization_ratio for engine in range(2)]
