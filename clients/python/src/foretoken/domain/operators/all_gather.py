"""Collect the shards of all ranks on every rank."""

from foretoken.domain.operators.spec.collective import (
    CollectiveWork,
    all_but_own,
    collective_operator,
    sweep_groups,
)

SPEC = collective_operator(
    "all_gather",
    "every rank receives all shards",
    CollectiveWork(
        message_meaning="bytes of the gathered tensor",
        moved_bytes=all_but_own,
        sweep=sweep_groups,
        shares_node_links=True,
    ),
)
