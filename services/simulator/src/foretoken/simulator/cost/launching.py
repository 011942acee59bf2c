"""What the host takes to send a step to the device kernel by kernel."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.lowering.graph import OperatorNode, RankContext
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.variant import parse_variant
from foretoken.simulator.cost.family import prompt_nodes
from foretoken.simulator.grid import Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRules:
    """How long launches take: rules of `EngineProfile`, with `expert_call_us` as sorted pairs."""

    launch_us: float = 0.0
    expert_call_us: tuple[tuple[str, float], ...] = ()
    eager_us: float = 0.0
    spread_ratio: float = 0.0

    def time_node(self, node: OperatorNode) -> float:
        """Return what launching an operator once takes."""
        if node.is_experts:
            named = dict(self.expert_call_us)
            scheme = parse_variant(node.variant).get("quant", "")
            call_us = named.get(scheme, named.get("other"))
            if call_us is not None:
                return call_us
        return self.launch_us * _count_kernels(node)


def launch_rules(engine: EngineProfile) -> LaunchRules:
    """Return the rules of an engine."""
    return LaunchRules(
        launch_us=engine.launch_us,
        expert_call_us=tuple(sorted(engine.expert_call_us.items())),
        eager_us=engine.eager_us,
        spread_ratio=engine.launch_spread_ratio,
    )


def time_launches(
    rules: LaunchRules, options: LoweringOptions, ranks: Sequence[RankContext]
) -> Floats:
    """Return what launching the step of a prompt takes on each rank."""
    return np.array(
        [
            rules.eager_us
            + sum(node.repeat * rules.time_node(node) for node in prompt_nodes(options, rank))
            for rank in ranks
        ]
    )


def count_launches(nodes: Iterable[OperatorNode]) -> float:
    """Return how many kernels operators are."""
    return float(sum(node.repeat * _count_kernels(node) for node in nodes))


def _count_kernels(node: OperatorNode) -> int:
    """Return how many kernels an operator is; products in 8 bit and less quantise by one."""
    quantises = node.operator == "gemm" and node.dtype.num_bytes <= 1
    return find_operator(node.operator).num_launches + quantises
