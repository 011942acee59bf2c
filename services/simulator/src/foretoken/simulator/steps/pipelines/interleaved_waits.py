"""How long ranks of the interleaved schedule wait for each other's transfers.

Where both ends take part in a transfer, a sender waits until the receiver comes to it, which the
schedule places as if backward passes took twice as long as forward ones. What that costs is the
same for every group of micro batches after the second. The event simulator tells it for chunks that
are alike, over ratios of the times; in between it is interpolated.
"""

from functools import cache

import numpy as np

from foretoken.simulator.grid import Floats, cross_points, grid_corners
from foretoken.simulator.steps.pipelines.events import ChunkTimes, LinkRules, Time, run_pipeline
from foretoken.simulator.steps.pipelines.schedule import find_schedule

# Shares of a forward pass in both, and of a transfer.
_FORWARD_SHARES = np.array([0.2, 0.225, 0.25, 0.275, 0.3, 1 / 3, 0.36, 0.4, 0.45, 0.5])
_SEND_SHARES = np.array([0.0, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4])
# Groups of micro batches that are simulated: what more of them cost is linear.
_NUM_GROUPS = (1, 2, 3)
# A table of more passes than this takes seconds, and there waits are left out.
_MOST_PASSES = 60_000


def interleaved_waits_us(
    chunks: tuple[int, int], groups: Time, times_us: tuple[Time, Time, Time], rules: LinkRules
) -> Time:
    """Return what ranks wait in a step besides the longest chain of passes and transfers, in µs.

    `chunks` are ranks and chunks per rank, `groups` how many times as many micro batches as ranks
    there are. `times_us` are of a forward pass, a backward pass and a transfer; with `groups` they
    may be columns.
    """
    forward_us, backward_us, send_us = times_us
    num_ranks, virtual_stages = chunks
    num_passes = sum(_NUM_GROUPS) * num_ranks * num_ranks * virtual_stages * 2
    if rules.transfers != "rendezvous" or num_passes > _MOST_PASSES or num_ranks == 1:
        return 0.0 * forward_us
    both_us = np.maximum(forward_us + backward_us, 1e-9)
    table = _table(num_ranks, virtual_stages, rules.has_duplex_links)
    shape = np.broadcast(both_us, send_us).shape
    coordinates = [
        np.broadcast_to(np.asarray(share / both_us), shape).ravel()
        for share in (forward_us, send_us)
    ]
    waits = np.zeros((len(_NUM_GROUPS), coordinates[0].size))
    for corner, weight in grid_corners([_FORWARD_SHARES, _SEND_SHARES], coordinates):
        waits += table[:, corner] * weight
    first, second, third = (both_us * row.reshape(shape) for row in waits)
    later = second + (groups - 2) * (third - second)
    return np.maximum(0.0, np.where(groups < 2, first, later))  # noqa: PLR2004 - the second group


@cache
def _table(num_ranks: int, virtual_stages: int, has_duplex_links: bool) -> Floats:
    """Return the waits of a step whose passes take 1 together: (groups, point of the grid)."""
    forward, send = cross_points([_FORWARD_SHARES, _SEND_SHARES])
    num_chunks = num_ranks * virtual_stages
    none = np.zeros_like(send)
    chunks = [
        ChunkTimes(
            forward_us=forward,
            backward_input_us=1 - forward,
            send_forward_us=send if chunk < num_chunks - 1 else none,
            send_backward_us=send if chunk else none,
        )
        for chunk in range(num_chunks)
    ]
    rules = LinkRules(transfers="rendezvous", has_duplex_links=has_duplex_links)
    found = []
    for count in _NUM_GROUPS:
        orders = find_schedule("interleaved").orders(num_ranks, count * num_ranks, virtual_stages)
        ends = np.max(np.stack(run_pipeline(orders, chunks, rules).rank_ends_us), axis=0)
        ends = np.asarray(ends, dtype=np.float64)
        found.append(ends - _chain(num_ranks, count * num_ranks, virtual_stages, (forward, send)))
    return np.array(found)


def _chain(
    num_ranks: int, num_micro_batches: int, virtual_stages: int, times: tuple[Floats, Floats]
) -> Floats:
    """Return the longest chain through a rank: the way to it, its work, and the way back."""
    _, send = times
    longest = np.zeros_like(send)
    for rank in range(num_ranks):
        num_sends = 2 * virtual_stages - (rank == 0) - (rank == num_ranks - 1)
        work = num_micro_batches * (virtual_stages + num_sends * send) - send * (rank > 0)
        longest = np.maximum(longest, rank * (1 + 2 * send) + work)
    return longest
