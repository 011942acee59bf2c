"""Send a tensor from one rank to another, as pipeline stages do."""

from foretoken.domain.operators.spec.collective import (
    CollectiveWork,
    collective_operator,
    sweep_pairs,
)

SPEC = collective_operator(
    "send_recv",
    "point-to-point copy: two devices of one node, or one device on each of two nodes",
    CollectiveWork(
        message_meaning="bytes sent",
        moved_bytes=lambda message_bytes, _: 1.0 * message_bytes,
        sweep=sweep_pairs,
    ),
)
