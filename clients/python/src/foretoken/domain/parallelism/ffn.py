"""Attention and experts apart: the ranks of the layout attend, devices of their own hold experts.

`ffn_devices` hold the experts, each as many as another. The ranks of the layout have all else of a
layer, the gate, shared experts and dense layers too, and the KV cache. A token goes from the rank
that has it to every device with an expert of it (once for each expert with `deepep_low_latency`,
once over the network to a node with `deepep_normal`), and the sums come back. The busiest of both
sides says how long that takes. Copies to devices of one node spread over its links as an exchange
between all of both sides would.
Source: MegaScale-Infer (arXiv 2504.02263); vllm-project/afd-plugin,
docs/design/module/model_integration.md (the gate and dense layers with attention).
"""

from collections.abc import Iterator

from foretoken.domain.lowering.options import LayoutCases, Lowering, Nodes, ParallelPass
from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.limit import Limit


def _limits(cases: LayoutCases) -> Iterator[Limit]:
    num_devices = cases.ffn_devices
    if num_devices == 0:
        return
    experts = stack_of(cases.model).experts
    yield Limit(
        "experts",
        not experts,
        lambda: f"{cases.model.name} has no experts to run apart; leave it at 0",
    )
    is_shared = (cases.dp > 1) & ((cases.ep > 1) | cases.attention_dp)
    yield Limit(
        "experts",
        not is_shared,
        lambda: "engines that step together have experts apart; set layout.dp and layout.ep",
    )
    yield Limit(
        "experts",
        cases.expert_exchange == "all_gather",
        lambda: "tokens go to the experts of each; set engine.rules.expert_exchange all_to_all",
    )
    for part in experts:
        yield _divided(part["num_experts"] + cases.num_redundant_experts, num_devices)


def _divided(num_held: int, num_devices: int) -> Limit:
    return Limit(
        "experts",
        num_held % num_devices != 0,
        lambda: f"{num_devices} does not divide the {num_held} experts and copies",
    )


def _keep(nodes: Nodes, _lowering: Lowering) -> Nodes:
    """Return the operators as they are: `ep.py` spreads experts, over these devices too."""
    return nodes


PASS = ParallelPass(axis="ffn", limits=_limits, rewrite=_keep)
