"""Data parallelism: every rank runs the same graph on its own samples.

Nothing changes inside a forward pass; a training step sums the gradients over the group at its
end, which `gradient_reduction` returns.
"""

from collections.abc import Iterator

from foretoken.domain.estimate import DType
from foretoken.domain.graph import OperatorNode, RankContext, Section
from foretoken.domain.lowering import Nodes, ParallelPass
from foretoken.domain.placement import group_dims


def gradient_reduction(num_params: int, grad_dtype: DType, rank: RankContext) -> Nodes:
    """Return the gradient all-reduce of a rank that holds `num_params`; none without dp."""
    if rank.layout.dp == 1:
        return ()
    node = OperatorNode(
        role="gradient_all_reduce",
        group="collective",
        section=Section.GRADIENT,
        operator="all_reduce",
        dims={
            "message_bytes": round(num_params * grad_dtype.num_bytes),
            **group_dims(rank.layout, "dp", rank.devices_per_node),
        },
        dtype=grad_dtype,
    )
    return (node,)


def _check(_rank: RankContext) -> Iterator[str]:
    yield from ()


def _rewrite(nodes: Nodes, _rank: RankContext) -> Nodes:
    return nodes


PASS = ParallelPass(axis="dp", check=_check, rewrite=_rewrite)
