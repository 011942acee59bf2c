"""As many nodes to every stage, and one more to the first where they do not divide.

The sizes of nodes and the speed of stages are not looked at.
"""

import numpy as np

from foretoken.simulator.search.placement.chain import Chain, Cut, PartitionMethod


def cut_evenly(chain: Chain) -> Cut:
    """Return the even cut, if it has the memory."""
    whole, rest = divmod(chain.num_nodes, chain.num_stages)
    counts = np.full(chain.num_stages, whole)
    counts[:rest] += 1
    return Cut.at(np.cumsum(counts).tolist(), chain)


METHOD = PartitionMethod(name="even", cut=cut_evenly)
