"""Data parallelism: every rank runs the same graph on its own samples.

Nothing changes inside a forward pass. What training steps sum, scatter and gather over the group
follows from the parameters of a chunk of layers, which the simulator counts.
"""

from foretoken.domain.lowering.options import (
    Lowering,
    Nodes,
    ParallelPass,
)


def _rewrite(nodes: Nodes, _lowering: Lowering) -> Nodes:
    return nodes


PASS = ParallelPass(axis="dp", rewrite=_rewrite)
