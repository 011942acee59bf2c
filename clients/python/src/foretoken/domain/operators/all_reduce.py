"""Sum a tensor over all ranks of a group; every rank gets the sum."""

from foretoken.domain.operators.spec.collective import (
    CollectiveWork,
    all_but_own,
    collective_operator,
    sweep_groups,
)

SPEC = collective_operator(
    "all_reduce",
    "ring all-reduce: reduce-scatter then all-gather",
    CollectiveWork(
        message_meaning="bytes of the tensor on one rank",
        moved_bytes=lambda message_bytes, num_ranks: 2 * all_but_own(message_bytes, num_ranks),
        sweep=sweep_groups,
        shares_node_links=True,
    ),
)
