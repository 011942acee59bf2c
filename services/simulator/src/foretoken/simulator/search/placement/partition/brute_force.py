"""Every cut there is, for chains small enough: what the other methods are held against."""

from collections.abc import Iterator
from itertools import combinations, islice
from math import comb

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.errors import InvalidRequestError
from foretoken.simulator.search.placement.chain import Chain, Cut, PartitionMethod

# Some seconds of work.
MAX_CUTS = 2_000_000
_PER_BLOCK = 20_000


def cut_by_force(chain: Chain) -> Cut:
    """Return the best of all cuts, of equal ones the first.

    Raises:
        InvalidRequestError: more cuts than anyone looks at.

    """
    num_cuts = comb(chain.num_nodes - 1, chain.num_stages - 1)
    if num_cuts > MAX_CUTS:
        raise InvalidRequestError.of_field(
            "partition",
            f"brute_force would look at {num_cuts:.3g} cuts of {chain.num_nodes} nodes to"
            f" {chain.num_stages} stages, more than {MAX_CUTS:,}; use dynamic, which is as good",
        )
    best = Cut()
    for ends in _blocks(chain):
        longest = np.where(chain.fits(ends), chain.stage_costs(ends).max(axis=-1), np.inf)
        row = int(np.argmin(longest))
        if longest[row] < best.longest:
            best = Cut.at(ends[row].tolist(), chain, is_optimal=True)
    return best


def _blocks(chain: Chain) -> Iterator[NDArray[np.int64]]:
    """Yield where the stages of cuts end, many cuts at once: (cuts, stages)."""
    places = combinations(range(1, chain.num_nodes), chain.num_stages - 1)
    while block := list(islice(places, _PER_BLOCK)):
        inner = np.asarray(block, dtype=np.int64).reshape(len(block), chain.num_stages - 1)
        last = np.full((len(block), 1), chain.num_nodes)
        yield np.concatenate([inner, last], axis=1)


METHOD = PartitionMethod(name="brute_force", cut=cut_by_force)
