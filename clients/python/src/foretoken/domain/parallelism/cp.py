"""Context parallelism: split every sequence over the ranks of a group.

By `ring` keys and values go around, by `all_to_all` ranks exchange heads; other exchanges are
passes of their own. All else runs on a rank's own tokens.
"""

from collections.abc import Iterator

from foretoken.domain.lowering.communication import axis_group
from foretoken.domain.lowering.context_parallel import (
    attend_in_ring,
    exchange_heads,
    head_limits,
    sequence_limits,
)
from foretoken.domain.lowering.options import (
    LayoutCases,
    Lowering,
    Nodes,
    ParallelPass,
)
from foretoken.domain.requests.limit import Limit
from foretoken.domain.requests.scenario import CONTEXT_PARALLELS


def _limits(cases: LayoutCases) -> Iterator[Limit]:
    cp, training = cases.cp, cases.training
    if training is None:
        yield Limit(
            "sequence",
            cp > 1,
            lambda: "splitting sequences is simulated for training alone; leave it at 1",
        )
        return
    num_pieces = cp * (1 + cases.is_isp * (cases.tp - 1)) * (1 + (cp > 1))
    yield Limit(
        "sequence",
        training.sequence_length % num_pieces != 0,
        lambda: (
            f"a sequence of {training.sequence_length} tokens is cut into {num_pieces} pieces,"
            " two for each rank of cp, and they must be alike"
        ),
    )
    yield Limit(
        "sequence",
        (cp > 1) & (training.context_parallel not in CONTEXT_PARALLELS),
        lambda: f"context_parallel must be one of {', '.join(CONTEXT_PARALLELS)}",
    )
    trainer = training.trainer
    yield Limit(
        "heads",
        (cp > 1) & (trainer.attention != "flash"),
        lambda: f"{trainer.name} computes attention by whole rows of scores; leave it at 1",
    )
    is_exchanged = training.context_parallel == "all_to_all"
    yield from sequence_limits(cases, training, cp > 1, is_exchanged)
    if is_exchanged:
        yield from head_limits(cases, cases.tp * cp, cp > 1)


def _rewrite(nodes: Nodes, lowering: Lowering) -> Nodes:
    rank, training = lowering.rank, lowering.options.training
    if rank.layout.cp == 1 or training is None:
        return nodes
    if training.context_parallel == "all_to_all":
        return exchange_heads(nodes, rank, axis_group(rank.layout, "cp"))
    if training.context_parallel == "ring":
        is_hidden = training.trainer.overlaps_context_exchange
        return attend_in_ring(nodes, rank, is_hidden=is_hidden)
    return nodes


PASS = ParallelPass(axis="cp", limits=_limits, rewrite=_rewrite)
