"""Refuse a serving scenario that can never run, before anything is computed."""

from collections.abc import Iterator, Mapping

from foretoken.domain.hardware.device import check_format, find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.lowering.expert_layer import check_routing
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.cluster import ClusterSpec
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cluster.autoscaling import find_autoscaler
from foretoken.simulator.cluster.fleet import pool_scenarios
from foretoken.simulator.cluster.routing import find_router
from foretoken.simulator.cluster.setup import check_cluster
from foretoken.simulator.cost.latency_surfaces import quantization_of
from foretoken.simulator.engine.choice import find_scheduler
from foretoken.simulator.serving.draft import check_speculation
from foretoken.simulator.serving.engine_limit import check_engines


def check_scenario(scenario: ServingScenario) -> None:
    """Refuse names there are not and rules that cannot be, of the scenario and all its pools.

    Raises:
        InvalidRequestError: the engine's limits, a pool or an option cannot be used.
        UnknownDeviceError, UnknownTopologyError, UnknownOperatorError, UnknownPluginError: no such
            name.

    """
    if scenario.moe_routing:
        check_routing(scenario.moe_routing)
    for part in (scenario, *pool_scenarios(scenario)):
        find_scheduler(part.resolve_engine().scheduler)
        check_format("dtype", part.dtype, find_device(part.device))
        quantization_of(part)
        for name in part.kernels:
            find_operator(name)
        if part.topology:
            find_topology(part.topology)
    for part in pool_scenarios(scenario):
        check_speculation(part)
    check_cluster(scenario)
    check_engines(scenario)
    if scenario.cluster is not None:
        for name, options in _routers(scenario.cluster):
            find_router(name)(options, scenario.seed)
        for pool in scenario.cluster.pools:
            if pool.autoscaling is not None:
                make = find_autoscaler(pool.autoscaling.policy)
                make(pool.autoscaling.options, scenario.seed)


def _routers(cluster: ClusterSpec) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield cluster.routing.router, cluster.routing.options
    if cluster.is_disaggregated:
        yield cluster.decode_routing.router, cluster.decode_routing.options
