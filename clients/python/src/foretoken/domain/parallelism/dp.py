"""Data parallelism: every rank runs the same graph on its own samples.

Nothing changes inside a forward pass; a training step sums the gradients over the group at its
end, which `gradient_reduction` returns. Sharded states (ZeRO) are scattered and gathered over the
same group, which `shard_collective` returns.
"""

from collections.abc import Iterator

from foretoken.domain.estimate import DType
from foretoken.domain.graph import OperatorNode, RankContext, Section
from foretoken.domain.lowering import Lowering, Nodes, ParallelPass
from foretoken.domain.placement import group_dims


def gradient_reduction(num_params: int, grad_dtype: DType, rank: RankContext) -> Nodes:
    """Return the gradient all-reduce of a rank that holds `num_params`; none without dp."""
    return shard_collective("all_reduce", "gradient", num_params, grad_dtype, rank)


def shard_collective(
    operator: str, content: str, num_params: int, dtype: DType, rank: RankContext
) -> Nodes:
    """Return a collective over one value per parameter, shards put together; none without dp.

    `content` says what the values are: `gradient` or `parameter`.
    """
    if rank.layout.dp == 1:
        return ()
    node = OperatorNode(
        role=f"{content}_{operator}",
        group="gradient_reduction" if content == "gradient" else "parameter_gather",
        section=Section.GRADIENT,
        operator=operator,
        dims={
            "message_bytes": dtype.bytes_of(num_params),
            **group_dims(rank.layout, "dp", rank.devices_per_node),
        },
        dtype=dtype,
    )
    return (node,)


def _check(_rank: RankContext) -> Iterator[str]:
    yield from ()


def _rewrite(nodes: Nodes, _lowering: Lowering) -> Nodes:
    return nodes


PASS = ParallelPass(axis="dp", check=_check, rewrite=_rewrite)
