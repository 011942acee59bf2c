"""How many keys the queries of a causal sequence see where no query may see more than so many.

A query at position p sees p keys, itself included; under a limit, such as a window or a selection,
the smaller of the two. Keys that stand for a block of tokens exist once their block is complete.
"""

from foretoken.domain.units import Quantity, smaller


def limited_pairs(q_len: Quantity, context_len: Quantity, limit: Quantity) -> Quantity:
    """Return the query-key pairs of `q_len` new tokens after `context_len` cached ones."""
    return _limited_sum(context_len + q_len, limit) - _limited_sum(context_len, limit)


def block_pairs(
    q_len: Quantity, context_len: Quantity, block: Quantity, limit: Quantity
) -> Quantity:
    """Return the same where a key stands for `block` tokens; `limit` counts such keys."""
    return _block_sum(context_len + q_len, block, limit) - _block_sum(context_len, block, limit)


def _limited_sum(length: Quantity, limit: Quantity) -> Quantity:
    """Return the sum of min(p, limit) over the positions up to `length`."""
    free = smaller(length, limit)
    return free * (free + 1) // 2 + (length - free) * limit


def _block_sum(length: Quantity, block: Quantity, limit: Quantity) -> Quantity:
    """Return the sum of min(p // block, limit) over the positions up to `length`."""
    free = smaller(length, block * (limit + 1) - 1)
    whole = free // block
    return block * whole * (whole - 1) // 2 + whole * (free % block + 1) + (length - free) * limit
