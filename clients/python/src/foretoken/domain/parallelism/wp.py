"""Weight parallelism: InternEvo's ways to split weights and activations over ranks.

`msp` and `fsp` are tensor parallelism with tokens split between its GEMMs (`tp` does that); `isp`
keeps weights in shares over `weight_degree` ranks. It gathers those of a module ahead of its use,
again in the backward pass, and scatters the sums of their gradients.
Source: InternEvo, `internlm/core/parallel/comm/isp.py`; Chen et al., "InternEvo: Efficient
Long-Sequence Large Language Model Training via Hybrid Parallelism and Redundant Sharding", 2024.
"""

import dataclasses
from collections.abc import Iterator

from foretoken.domain.lowering.communication import PlacedGroup, RankGroup
from foretoken.domain.lowering.expert_layer import larger
from foretoken.domain.lowering.graph import OperatorNode, Overlap
from foretoken.domain.lowering.options import (
    LayoutCases,
    Lowering,
    Nodes,
    ParallelPass,
)
from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.limit import Limit

_FORMS = ("", "msp", "fsp", "isp")
# What holds its weights in shares; norms are whole everywhere.
_SHARED = ("gemm", "embedding")


def _limits(cases: LayoutCases) -> Iterator[Limit]:
    training, degree, num_ranks = cases.training, cases.weight_degree, cases.stage_ranks
    if training is None:
        return
    yield Limit(
        "weight_parallel",
        training.weight_parallel not in _FORMS,
        lambda: "must be msp, fsp, isp or empty",
    )
    yield Limit(
        "weight_parallel",
        cases.is_isp & bool(stack_of(cases.model).experts),
        lambda: "isp splits no experts; use ep, or msp",
    )
    yield Limit(
        "weight_parallel",
        cases.is_isp & ((degree < 1) | (num_ranks % larger(degree, 1) != 0)),
        lambda: f"weight_degree {degree} does not divide the {num_ranks} ranks of tp, cp and dp",
    )


def _rewrite(nodes: Nodes, lowering: Lowering) -> Nodes:
    training = lowering.options.training
    if training is None or training.weight_parallel != "isp" or training.weight_degree == 1:
        return nodes
    ranks = RankGroup(axis="tp", degree=training.weight_degree)
    group = PlacedGroup.of_rank(ranks, lowering.rank)
    return tuple(part for node in nodes for part in _with_gather(node, group))


def _with_gather(node: OperatorNode, group: PlacedGroup) -> Iterator[OperatorNode]:
    if node.operator in _SHARED and node.num_weights:
        num_weights = node.num_weights // node.repeat
        role = f"{node.role}_weight_all_gather"
        gather = group.collective(
            node, role, "all_gather", node.written_dtype.bytes_of(num_weights)
        )
        yield dataclasses.replace(gather, overlap=Overlap.PREFETCH)
    yield node


PASS = ParallelPass(axis="wp", limits=_limits, rewrite=_rewrite)
