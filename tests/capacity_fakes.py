"""Deployments with costs of their own, and loads on them, for tests of the capacity search."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import LatencyLimit, ServingTargets
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.simulator.cost.tables import CostTables, flat_tables
from foretoken.simulator.search.capacity.probe import Load, make_judge
from foretoken.simulator.search.capacity.rate import draw_plan, rate_of_plan
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import RequestPlan

# A request of the single server: as many steps as tokens.
NUM_TOKENS, STEP_MS = 10, 10.0


@dataclass(frozen=True)
class TableDeployment:
    """Engines whose steps cost what tables say."""

    setup: DeploymentSetup
    tables: CostTables

    def run(self, plan: RequestPlan, progress: Callable[[float], None]) -> ServingRecord:
        """Return what the engines did."""
        return run_deployment(plan, self.setup, self.tables, progress)


def single_server() -> TableDeployment:
    """Return an engine that serves one request at a time, in 10 steps of 10 ms."""
    profile = EngineProfile(name="server", engine="none", max_num_seqs=1)
    setup = DeploymentSetup(profile=profile, num_kv_blocks=100)
    return TableDeployment(setup, flat_tables(1e3 * STEP_MS, 0.0))


def limits(*named: tuple[str, float, float]) -> ServingTargets:
    """Return targets of (metric, percentile, limit in ms)."""
    return ServingTargets(
        limits=tuple(
            LatencyLimit(metric=metric, percentile=percentile, limit_ms=limit_ms)
            for metric, percentile, limit_ms in named
        )
    )


def drawn_scenario(num_requests: int, seed: int = 0, **changes: Any) -> ServingScenario:
    """Return Poisson arrivals of requests that the single server serves in 100 ms each."""
    workload = WorkloadSpec(
        num_requests=num_requests,
        prefill=LengthSpec(mean=16),
        decode=LengthSpec(mean=NUM_TOKENS),
        **changes,
    )
    model = find_model("qwen2-7b")
    return ServingScenario(model=model, device="a30", seed=seed, workload=workload)


def load_of(scenario: ServingScenario, targets: ServingTargets) -> Load:
    """Return the requests of a scenario on the single server."""
    plan = draw_plan(scenario, scenario.seed)
    return Load(
        deployment=single_server(),
        plan=plan,
        plan_rps=rate_of_plan(scenario.workload, plan),
        judge=make_judge(targets, scenario),
    )
