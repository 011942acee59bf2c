"""Copy a tensor from one rank of a group to all others."""

from foretoken.domain.operators.spec.collective import (
    CollectiveWork,
    collective_operator,
    sweep_groups,
)

SPEC = collective_operator(
    "broadcast",
    "pipelined broadcast: every rank receives the tensor of the first one",
    CollectiveWork(
        message_meaning="bytes of the tensor",
        moved_bytes=lambda message_bytes, _: 1.0 * message_bytes,
        sweep=sweep_groups,
        shares_node_links=True,
    ),
)
