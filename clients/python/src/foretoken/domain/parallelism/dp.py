"""Data parallelism: every rank runs the same graph on its own samples.

Nothing changes inside a forward pass. What training steps sum, scatter and gather over the group
follows from the parameters of a chunk of layers, which the simulator counts.
"""

from collections.abc import Iterator

from foretoken.domain.graph import RankContext
from foretoken.domain.lowering_options import (
    Lowering,
    LoweringOptions,
    Nodes,
    ParallelPass,
)


def _check(_rank: RankContext, _options: LoweringOptions | None) -> Iterator[str]:
    yield from ()


def _rewrite(nodes: Nodes, _lowering: Lowering) -> Nodes:
    return nodes


PASS = ParallelPass(axis="dp", check=_check, rewrite=_rewrite)
