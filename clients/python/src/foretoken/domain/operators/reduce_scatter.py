"""Sum over ranks; every rank keeps one shard of the sum."""

from foretoken.domain.operators.spec.collective import (
    CollectiveWork,
    all_but_own,
    collective_operator,
    sweep_groups,
)

SPEC = collective_operator(
    "reduce_scatter",
    "every rank receives one reduced shard",
    CollectiveWork(
        message_meaning="bytes of the whole tensor on one rank",
        moved_bytes=all_but_own,
        sweep=sweep_groups,
        shares_node_links=True,
    ),
)
