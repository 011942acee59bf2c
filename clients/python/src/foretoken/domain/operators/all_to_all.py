"""Every rank sends a different shard to every other rank."""

from foretoken.domain.operators.spec.collective import (
    CollectiveWork,
    all_but_own,
    collective_operator,
    sweep_groups,
)

SPEC = collective_operator(
    "all_to_all",
    "exchange shards between all pairs of ranks",
    CollectiveWork(
        message_meaning="bytes one rank sends, its own share included",
        moved_bytes=all_but_own,
        sweep=sweep_groups,
    ),
)
